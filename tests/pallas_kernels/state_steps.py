"""The ops that advance states in pages, and comparisons of their results."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import PagedStates
from pallas_kernels.gated_delta_step import cases as delta_cases
from pallas_kernels.gated_delta_step.api import _BODIES as DELTA_BODIES
from pallas_kernels.selective_step import cases as selective_cases
from pallas_kernels.selective_step.api import _BODIES as SELECTIVE_BODIES
from pallas_kernels.ssd_step import cases as ssd_cases
from pallas_kernels.ssd_step.api import _BODIES as SSD_BODIES


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOp:
    """An op that advances states in pages by one token of each request."""

    name: str
    bodies: dict[str, Any]
    cases: tuple[Any, ...]  # the kernel can compute all but the last one
    build_inputs: Callable[..., tuple[Any, ...]]
    # One step in NumPy: takes the states before it and the tokens; returns results and new states.
    rule: Callable[..., tuple[np.ndarray, np.ndarray]]
    # Cases that differ for the bodies in plain JAX. The others differ in how the kernel cuts them.
    plain_cases: tuple[str, ...]
    misfit: str  # words of the reason why the kernel rejects the last case

    @property
    def op(self):
        return getattr(pallas_kernels, self.name)

    def rule_of(self, tokens):
        """The rule as a function of the states before the step, for one token of each request."""
        tokens_np = [np.asarray(array).astype(np.float64) for array in tokens]
        return lambda before_np: self.rule(before_np, *tokens_np)


def delta_step(before, q, k, v, log_decay, beta):
    state = np.exp(log_decay.reshape(*log_decay.shape[:2], -1, 1)) * before
    remembered = np.einsum("rhk,rhkv->rhv", k, state)
    change = beta[..., None] * (v - remembered)
    state = state + np.einsum("rhk,rhv->rhkv", k, change)
    return np.einsum("rhk,rhkv->rhv", q, state), state


def selective_step(before, x, dt, a, b, c):
    state = np.exp(dt[:, :, None] * a) * before + np.einsum("rgn,rgw->rgnw", b, dt * x)
    return np.einsum("rgn,rgnw->rgw", c, state), state


def ssd_step(before, x, b, c, log_decay):
    b, c = (np.repeat(array, x.shape[1] // b.shape[1], axis=1) for array in (b, c))
    state = np.exp(log_decay)[..., None, None] * before + np.einsum("rhp,rhn->rhpn", x, b)
    return np.einsum("rhn,rhpn->rhp", c, state), state


# All kinds of requests, states in one page, and 16 bits: for all other numbers, and for states.
PLAIN_CASES = ("rows_of_all_kinds", "one_page", "halves", "bfloat16_states")
STEP_OPS = (
    StepOp(
        name="gated_delta_step",
        bodies=DELTA_BODIES,
        cases=delta_cases.CASES,
        build_inputs=delta_cases.build_inputs,
        rule=delta_step,
        plain_cases=(*PLAIN_CASES, "decay_per_row"),
        misfit="multiple of 4 x 32, got 8 x 6",
    ),
    StepOp(
        name="selective_step",
        bodies=SELECTIVE_BODIES,
        cases=selective_cases.CASES,
        build_inputs=selective_cases.build_inputs,
        rule=selective_step,
        plain_cases=PLAIN_CASES,
        misfit="multiple of 128, got 6",
    ),
    StepOp(
        name="ssd_step",
        bodies=SSD_BODIES,
        cases=ssd_cases.CASES,
        build_inputs=ssd_cases.build_inputs,
        rule=ssd_step,
        plain_cases=PLAIN_CASES,
        misfit="multiple of 4 x 32, got 3 x 6",
    ),
)


def abstract_states():
    """Shapes of the states of 3 requests, of up to 64 numbers each, for tracing an op."""
    return PagedStates(
        pages=jax.ShapeDtypeStruct((2, 9, 32), jnp.bfloat16),
        row=jax.ShapeDtypeStruct((), jnp.int32),
        read_blocks=jax.ShapeDtypeStruct((3, 4), jnp.int32),
        write_blocks=jax.ShapeDtypeStruct((3, 4), jnp.int32),
        starts_from_zero=jax.ShapeDtypeStruct((3,), jnp.bool_),
        dtype="float32",
    )


def each_op():
    return pytest.mark.parametrize("op", STEP_OPS, ids=lambda op: op.name)


def each_case():
    """Each op with each of its cases that the kernel can compute."""
    pairs = [(op, case) for op in STEP_OPS for case in op.cases[:-1]]
    names = [f"{op.name}-{case.name}" for op, case in pairs]
    return pytest.mark.parametrize(("op", "case"), pairs, ids=names)


def each_plain_case():
    """Each op with each of its cases; those not in `plain_cases` run with `pytest -m slow` only."""
    params = [
        pytest.param(
            *(op, case),
            id=f"{op.name}-{case.name}",
            marks=() if case.name in op.plain_cases else pytest.mark.slow,
        )
        for op in STEP_OPS
        for case in op.cases
    ]
    return pytest.mark.parametrize(("op", "case"), params)


def assert_steps_are_close(case, states, got, wanted, tolerance=1e-5):
    """Compares the results of requests that write, and all pages.

    Numbers that the step does not write must keep their bits.
    """
    states = jax.device_get(states)
    is_written = np.asarray(states.is_written)
    out, wanted_out = (np.asarray(result[1])[is_written] for result in (got, wanted))
    np.testing.assert_allclose(out, wanted_out, rtol=tolerance, atol=tolerance)
    dtype = jnp.dtype(case.state_dtype)
    numbers, wanted_numbers, before = (
        _without_tails(case, states, np.asarray(pages).view(dtype))
        for pages in (got[0], wanted[0], states.pages)
    )
    bits, wanted_bits, bits_before = (
        x.view(f"uint{8 * dtype.itemsize}") for x in (numbers, wanted_numbers, before)
    )
    is_kept = wanted_bits == bits_before
    np.testing.assert_array_equal(bits[is_kept], wanted_bits[is_kept])
    limit = tolerance if dtype == jnp.float32 else 1e-2
    new, wanted_new = (x[~is_kept].astype(np.float32) for x in (numbers, wanted_numbers))
    np.testing.assert_allclose(new, wanted_new, rtol=limit, atol=limit)


def _without_tails(case, states, numbers_np):
    """The pages with zeros after the end of each written state in its last page."""
    numbers_np = numbers_np.copy()
    size = states.first_number + np.prod(case.state_shape)
    rest = size - (states.write_blocks.shape[1] - 1) * numbers_np.shape[2]
    last_blocks = np.asarray(states.write_blocks)[np.asarray(states.is_written), -1]
    numbers_np[int(states.row), last_blocks, rest:] = 0
    return numbers_np


def assert_is_step_of_rule(case, states, got, rule):
    """Compares with `rule`, which takes and returns arrays of states; NumPy reads the pages.

    Args:
        rule: Takes the states before the step; returns the results and the states after it.
    """
    states = jax.device_get(states)
    dtype = jnp.dtype(case.state_dtype)
    before_np = np.asarray(states.pages).view(dtype)[int(states.row)]
    first, num_numbers = states.first_number, np.prod(case.state_shape)

    def slot(numbers_np, blocks):
        return numbers_np[blocks].reshape(-1)[first : first + num_numbers]

    found = [slot(before_np, blocks) for blocks in np.asarray(states.read_blocks)]
    found = np.stack(found).reshape(-1, *case.state_shape).astype(np.float32)
    found[np.asarray(states.starts_from_zero)] = 0
    out, after = map(np.asarray, rule(found))
    wanted_np = np.asarray(states.pages).view(dtype).copy()
    for req in np.flatnonzero(states.is_written):
        blocks = np.asarray(states.write_blocks)[req]
        written = wanted_np[int(states.row), blocks].reshape(-1)
        written[first : first + num_numbers] = after[req].reshape(-1)
        wanted_np[int(states.row), blocks] = written.reshape(len(blocks), -1)
    wanted = wanted_np.view(np.asarray(states.pages).dtype), out
    assert_steps_are_close(case, states, got, wanted)
