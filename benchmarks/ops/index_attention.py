"""Checks and timings of index attention on a GPU, which has no kernels of its own yet.

Each result is checked against the reference body on the CPU. The tests compare that body with
NumPy.
"""

import dataclasses
import functools

import jax
import numpy as np

import pallas_kernels
from benchmarks.ops.device_calls import MeasuredOp, Problem, Work
from benchmarks.ops.findings import ERROR_LIMITS, close_findings, same_finding
from benchmarks.units.unit import Finding
from pallas_kernels.latent_attention.cases import CASES, LatentAttentionCase, build_inputs

_TOP_K = 16
_CHECKED = [case for case in CASES if not case.is_uint16 and any(n for n, _ in case.requests)]


def _choose(case: LatentAttentionCase, seed: int) -> Problem:
    """Queries and keys of small integers, so that scores are exact and many of them are equal."""
    drawn = build_inputs(case, seed)
    q_np = np.concatenate([drawn.q_latent, drawn.q_rope], axis=-1).round().clip(-2, 2)
    keys_np = np.asarray(drawn.kv_cache).round().clip(-2, 2)
    weights_np = np.random.default_rng(seed).integers(-2, 3, q_np.shape[:2]).astype(np.float32)
    # `jnp.asarray` would compile a program for each dtype and shape.
    arrays = jax.device_put((q_np, weights_np, keys_np, np.int32(drawn.row)))
    arrays = (*arrays, *drawn.arrays[4:])
    rules = {"top_k": _TOP_K}
    wanted_np = np.asarray(_reference("index_top_k", arrays, rules))

    def verify(chosen: jax.Array) -> list[Finding]:
        return [same_finding("positions", np.asarray(chosen), wanted_np)]

    return Problem(arrays=arrays, rules=rules, verify=verify)


def _attend(case: LatentAttentionCase, seed: int) -> Problem:
    """Each token attends to the tokens just before it, and to itself."""
    drawn = build_inputs(case, seed)
    starts_np, lens_np = np.asarray(drawn.query_start_loc), np.asarray(drawn.arrays[5])
    token_idx = np.arange(drawn.q_latent.shape[0])
    req_idx = np.searchsorted(starts_np[1:], token_idx, side="right")
    req_idx = np.minimum(req_idx, len(lens_np) - 1)
    own_np = lens_np[req_idx] - starts_np[req_idx + 1] + token_idx
    positions_np = own_np[:, None] - np.arange(_TOP_K)
    is_used = (token_idx < starts_np[-1])[:, None] & (positions_np >= 0)
    positions_np = np.where(is_used, positions_np, pallas_kernels.NO_POSITION)
    row, positions = jax.device_put((np.int32(drawn.row), positions_np.astype(np.int32)))
    arrays = (*drawn.arrays[:3], row, *drawn.arrays[4:], positions)
    rules = {"scale": case.scale}
    wanted_np = np.asarray(_reference("sparse_latent_attention", arrays, rules), np.float64)

    def verify(out: jax.Array) -> list[Finding]:
        return close_findings("out", np.asarray(out), wanted_np, ERROR_LIMITS[case.dtype])

    return Problem(arrays=arrays, rules=rules, verify=verify, is_exact=case.dtype == "float32")


def _reference(op: str, arrays: tuple[jax.Array, ...], rules: dict[str, int | float]) -> jax.Array:
    arrays = jax.device_put(arrays, jax.devices("cpu")[0])
    call = functools.partial(getattr(pallas_kernels, op), **rules, implementation="reference")
    return jax.jit(call)(*arrays)


# Layers of DeepSeek-V3.2, but for the number of chosen tokens: 16 decoding requests.
_LARGE = LatentAttentionCase(
    name="16x8,192",
    requests=((1, 8192),) * 16,
    num_padding_tokens=0,
    num_q_heads=128,
    latent_dim=512,
    rope_dim=64,
    block_size=64,
    dtype="bfloat16",
    scale=192**-0.5,
)
_INDEX = dataclasses.replace(_LARGE, num_q_heads=64, latent_dim=64, rope_dim=64)

INDEX_OPS = [
    MeasuredOp(
        op="index_top_k",
        problem=_choose,
        cases=_CHECKED,
        # Every key once.
        timed=[(_INDEX, Work(num_bytes=2 * 16 * 8192 * 128))],
        has_kernel=False,
    ),
    MeasuredOp(
        op="sparse_latent_attention",
        problem=_attend,
        cases=_CHECKED,
        # The chosen latents; queries and outputs.
        timed=[(_LARGE, Work(num_bytes=2 * 16 * (_TOP_K * 576 + 128 * (576 + 512))))],
        has_kernel=False,
    ),
]
