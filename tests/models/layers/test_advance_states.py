"""The states of rows without tokens are not computed if a program serves several widths."""

import functools
from dataclasses import replace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import CachePlace, ForwardBatch, KernelSettings, StateInputs, Wants
from models.cache.state_format import StateFormat
from models.forward.layer_context import LayerContext
from models.layers.advance_states import CHUNK_REQS, FEW_REQS, advance_states
from models.layers.gated_delta_net import LINEAR_ATTENTION, GatedDeltaNet, GatedDeltaNetConfig
from models.layers.kimi_delta_attention import (
    DELTA_ATTENTION,
    KimiDeltaAttention,
    KimiDeltaConfig,
)
from models.layers.lightning_attention import LIGHTNING, LightningAttention, LightningConfig
from models.layers.mamba import Mamba, MambaConfig
from models.layers.mamba2 import MAMBA, Mamba2, Mamba2Config
from models.layers.rg_lru import RECURRENT, RecurrentBlock, RecurrentBlockConfig
from pallas_kernels.gated_delta_rule import api as gated_delta_rule
from pallas_kernels.ragged_requests import request_of_token
from pallas_kernels.selective_scan import api as selective_scan
from pallas_kernels.ssd_scan import api as ssd_scan
from tests.quick_compile import QUICK_COMPILE, marked_sizes

NUM_ROWS = 2 * CHUNK_REQS + 4  # so that the last chunk has rows past the last one
FORMAT = StateFormat(shapes=((3, 2), (5,)), num_windows=1)
PAGE_WORDS = 8  # the window takes a page, and the state another


def make_context(
    num_used,
    widths: tuple[int, ...],
    tokens_each: int = 1,
    *,
    name: str = "own",
    state_format: StateFormat = FORMAT,
    kernels: KernelSettings = KernelSettings(),  # noqa: B008
) -> LayerContext:
    """One layer. Each row reads a slot of its own and writes another."""
    num_pages = state_format.num_pages(4 * PAGE_WORDS)
    row_idx = jnp.arange(NUM_ROWS + 1, dtype=jnp.int32)
    starts = tokens_each * jnp.minimum(row_idx, num_used)
    token_idx = jnp.arange(tokens_each * NUM_ROWS, dtype=jnp.int32)
    slots = 1 + np.random.default_rng(0).permutation(2 * num_pages * NUM_ROWS)
    slots = slots.reshape(2, 1, NUM_ROWS, num_pages)
    states = StateInputs(
        read_slots=jnp.asarray(slots[0], jnp.int32),
        write_slots=jnp.asarray(slots[1], jnp.int32),
        starts_from_zero=row_idx[:-1] % 3 == 1,
        is_alive=row_idx[:-1] % 5 != 3,
        query_start_loc=starts,
        has_one_token_each=tokens_each == 1,
        state_ends=None if tokens_each == 1 else starts[1:] - 1,
    )
    batch = ForwardBatch(
        token_ids=jnp.zeros_like(token_idx),
        positions=10 * token_idx,
        query_start_loc=starts,
        groups=(states,),
        logits_indices=row_idx[:-1],
        max_query_len=tokens_each,
        wants=Wants(logits="last"),
        widths=widths,
    )
    place = CachePlace(format=state_format, inputs_idx=0, group_idx=0, row=1)
    context = LayerContext(batch=batch, kernels=kernels, slots=(None,), cos_sin={})
    return context.at(0, ((name, place),))


def advance(arrays, states, state, context):
    """Each token sees the state of its request, which counts the tokens before `state_ends`."""
    (x,), (window, numbers) = arrays, states
    req = request_of_token(state.query_start_loc, x.shape[0])
    seen = (window.sum(axis=(1, 2)) + numbers.sum(axis=1))[req] + context.scan_positions
    ends = state.query_start_loc[1:] if state.state_ends is None else state.state_ends
    counts = (ends - state.query_start_loc[:-1])[:, None]
    return x * seen, (window + counts[..., None], 2 * numbers + counts)


@pytest.fixture(scope="module")
def advance_all():
    """The results and the pages after a step. Jitted for each value of `widths`."""

    def run(num_used, widths, tokens_each=1):
        rng = np.random.default_rng(1)
        # Blocks that no request has hold NaN, and so does the null block.
        pages = rng.standard_normal((2, 4 * NUM_ROWS + 2, PAGE_WORDS))
        pages[:, [0, -1]] = np.nan
        x = jnp.asarray(rng.standard_normal(tokens_each * NUM_ROWS), jnp.float32)
        context = make_context(num_used, widths, tokens_each)
        return advance_states(advance, "own", (x,), jnp.asarray(pages, jnp.float32), context)

    jitted = jax.jit(run, static_argnums=(1, 2), compiler_options=QUICK_COMPILE)
    # Results are NumPy arrays, because JAX would compile a program for each slice.
    return lambda *args: jax.device_get(jitted(*args))


@pytest.mark.parametrize("num_used", [0, 1, CHUNK_REQS, 2 * CHUNK_REQS - 3, NUM_ROWS])
def test_chunks_give_the_results_and_pages_of_all_rows_at_once(advance_all, num_used):
    wanted, wanted_pages = advance_all(num_used, ())
    out, pages = advance_all(num_used, (CHUNK_REQS, NUM_ROWS))
    np.testing.assert_array_equal(out[:num_used], wanted[:num_used])
    np.testing.assert_array_equal(pages, wanted_pages)
    assert np.isfinite(out).all()


@pytest.mark.parametrize("num_used", [0, FEW_REQS, FEW_REQS + 1, NUM_ROWS])
def test_few_requests_of_several_tokens_have_the_results_of_all_rows(advance_all, num_used):
    wanted, wanted_pages = advance_all(num_used, (), 3)
    out, pages = advance_all(num_used, (FEW_REQS, 3 * NUM_ROWS), 3)
    np.testing.assert_array_equal(out[: 3 * num_used], wanted[: 3 * num_used])
    np.testing.assert_array_equal(pages, wanted_pages)


def test_rows_without_tokens_are_not_computed(advance_all):
    """The result of a chunk without tokens is zero, whatever its rows hold."""
    out, _ = advance_all(CHUNK_REQS - 1, (CHUNK_REQS, NUM_ROWS))
    assert np.all(out[CHUNK_REQS:] == 0)
    at_once, _ = advance_all(CHUNK_REQS - 1, ())
    assert np.all(at_once[CHUNK_REQS:] != 0)


SIZES = {"hidden_size": 12, "kernel_size": 3}
HEADS = {"num_heads": 4, "head_dim": 4}
LAYERS = {
    MAMBA + "2": (Mamba2, Mamba2Config(**SIZES, **HEADS, state_size=6, num_groups=2, eps=1e-6)),
    MAMBA: (Mamba, MambaConfig(**SIZES, inner=16, state_size=4, time_step_rank=3)),
    LINEAR_ATTENTION: (
        GatedDeltaNet,
        GatedDeltaNetConfig(**SIZES, num_k_heads=2, num_v_heads=4, k_dim=4, v_dim=6, eps=1e-6),
    ),
    DELTA_ATTENTION: (KimiDeltaAttention, KimiDeltaConfig(**SIZES, **HEADS, eps=1e-6)),
    LIGHTNING: (LightningAttention, LightningConfig(hidden_size=12, **HEADS, activation="silu")),
    RECURRENT: (
        RecurrentBlock,
        RecurrentBlockConfig(**SIZES, width=16, num_blocks=2, activation="gelu_tanh"),
    ),
}


# The test of states that stay in the pages computes more of them in chunks.
QUICK_LAYERS = (MAMBA + "2",)


@pytest.fixture(scope="module")
def run_layer():
    """A layer's results of a step and the pages after it. The first row is of a used request."""

    def run(name, num_used, widths, **options):
        make_layer, config = LAYERS[name]
        graph, weights = nnx.split(make_layer(config, dtype=jnp.float32))
        rng = np.random.default_rng(2)
        weights = jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(np.float32), weights)
        num_pages = config.format().num_pages(4 * PAGE_WORDS)
        pages = rng.standard_normal((2, 2 * num_pages * NUM_ROWS + 1, PAGE_WORDS))
        pages = pages.astype(np.float32)
        hidden = rng.standard_normal((NUM_ROWS, config.hidden_size)).astype(np.float32)

        @functools.partial(jax.jit, compiler_options=QUICK_COMPILE)
        def step(num_used):
            own = {"name": name.rstrip("2"), "state_format": config.format(), **options}
            context = make_context(num_used, widths, **own)
            layer = nnx.merge(graph, weights)
            return layer(jnp.asarray(hidden), jnp.asarray(pages), context, norm=lambda x: x)

        out, new_pages = jax.device_get(step(num_used))
        assert np.any(new_pages != pages)
        return out[:num_used], new_pages

    return run


@pytest.mark.parametrize(
    "name", marked_sizes(QUICK_LAYERS, slow=sorted(LAYERS.keys() - QUICK_LAYERS))
)
def test_recurrent_layers_compute_in_chunks_what_they_compute_at_once(name, run_layer):
    num_used = 2 * CHUNK_REQS - 3
    wanted, wanted_pages = run_layer(name, num_used, ())
    out, new_pages = run_layer(name, num_used, (CHUNK_REQS, NUM_ROWS))
    np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(new_pages, wanted_pages, rtol=1e-4, atol=1e-5)


GPU_SETTINGS = KernelSettings(fuses_state_writes=True)


STEPS = {
    LINEAR_ATTENTION: (gated_delta_rule, "gated_delta_step"),
    MAMBA + "2": (ssd_scan, "ssd_step"),
    MAMBA: (selective_scan, "selective_step"),
    DELTA_ATTENTION: (gated_delta_rule, "gated_delta_step"),
    LIGHTNING: (ssd_scan, "ssd_step"),
}


@pytest.mark.parametrize("name", marked_sizes(list(STEPS)[:3], slow=list(STEPS)[3:]))
def test_states_that_stay_in_the_pages_equal_those_that_are_read_and_written(
    name, run_layer, monkeypatch
):
    num_used = NUM_ROWS - 2
    # In chunks, so that the normal run has chunks of these layers too.
    wanted, wanted_pages = run_layer(name, num_used, (CHUNK_REQS, NUM_ROWS))
    module, op = STEPS[name]
    step = mock.Mock(wraps=getattr(module, op))
    monkeypatch.setattr(module, op, step)
    out, pages = run_layer(name, num_used, (), kernels=GPU_SETTINGS)
    assert step.called
    is_alive = np.arange(num_used) % 5 != 3
    np.testing.assert_allclose(out[is_alive], wanted[is_alive], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(pages, wanted_pages, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "changes", [{"implementation": "xla"}, {"batch_invariant": True}, {"fuses_state_writes": False}]
)
def test_other_settings_read_and_write_arrays_of_states(changes):
    _, config = LAYERS[LINEAR_ATTENTION]
    settings = replace(GPU_SETTINGS, **changes)
    for kernels, wanted in ((GPU_SETTINGS, True), (settings, False)):
        context = make_context(1, (), state_format=config.format(), kernels=kernels)
        assert context.steps_in_pages(context.state("own")) is wanted
    context = make_context(1, (), 2, state_format=config.format(), kernels=GPU_SETTINGS)
    assert not context.steps_in_pages(context.state("own"))
