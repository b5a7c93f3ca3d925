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
from pallas_kernels.paged_attention.cases import PagedAttentionCase
from pallas_kernels.paged_attention.cases import build_inputs as build_paged_inputs

_TOP_K = 16
_CHECKED = [case for case in CASES if not case.is_uint16 and any(n for n, _ in case.requests)]

_CHECKED_HEADS = [
    PagedAttentionCase(name="mixed", requests=((5, 20), (1, 33), (0, 7), (3, 3))),
    PagedAttentionCase(name="bfloat16", requests=((40, 70), (1, 9)), dtype="bfloat16"),
]


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
    positions_np = _last_positions(drawn.query_start_loc, drawn.arrays[5], len(drawn.q_latent))
    row, positions = jax.device_put((np.int32(drawn.row), positions_np))
    arrays = (*drawn.arrays[:3], row, *drawn.arrays[4:], positions)
    return _compared("sparse_latent_attention", arrays, case.scale, case.dtype)


def _attend_to_heads(case: PagedAttentionCase, seed: int) -> Problem:
    """As `_attend`, to keys and values of several heads."""
    drawn = build_paged_inputs(case, seed)
    sequences = (drawn.block_tables, drawn.seq_lens, drawn.query_start_loc)
    positions_np = _last_positions(drawn.query_start_loc, drawn.seq_lens, len(drawn.q))
    row, positions = jax.device_put((np.int32(drawn.row), positions_np))
    arrays = (drawn.q, drawn.kv_cache, row, *sequences, positions)
    scale = drawn.rules["scale"]
    return _compared("sparse_paged_attention", arrays, scale, case.dtype)


def _last_positions(
    query_start_loc: jax.Array, seq_lens: jax.Array, num_tokens: int
) -> np.ndarray:  # i32[num_tokens, _TOP_K]
    """The position of each token, and those just before it."""
    starts_np, lens_np = np.asarray(query_start_loc), np.asarray(seq_lens)
    token_idx = np.arange(num_tokens)
    req_idx = np.searchsorted(starts_np[1:], token_idx, side="right")
    req_idx = np.minimum(req_idx, len(lens_np) - 1)
    own_np = lens_np[req_idx] - starts_np[req_idx + 1] + token_idx
    positions_np = own_np[:, None] - np.arange(_TOP_K)
    is_used = (token_idx < starts_np[-1])[:, None] & (positions_np >= 0)
    return np.where(is_used, positions_np, pallas_kernels.NO_POSITION).astype(np.int32)


def _compared(op: str, arrays: tuple[jax.Array, ...], scale: float, dtype: str) -> Problem:
    rules = {"scale": scale}
    wanted_np = np.asarray(_reference(op, arrays, rules), np.float64)

    def verify(out: jax.Array) -> list[Finding]:
        return close_findings("out", np.asarray(out), wanted_np, ERROR_LIMITS[dtype])

    return Problem(arrays=arrays, rules=rules, verify=verify, is_exact=dtype == "float32")


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
# An attention layer of Qwen4-Exp, likewise.
_LARGE_HEADS = PagedAttentionCase(
    name="16x8,192",
    requests=((1, 8192),) * 16,
    num_padding_tokens=0,
    num_q_heads=16,
    num_kv_heads=2,
    head_dim=256,
    dtype="bfloat16",
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
    MeasuredOp(
        op="sparse_paged_attention",
        problem=_attend_to_heads,
        cases=_CHECKED_HEADS,
        # Bytes of the chosen keys and values, and of queries and outputs.
        timed=[(_LARGE_HEADS, Work(num_bytes=2 * 16 * 2 * 256 * (_TOP_K * 2 + 16)))],
        has_kernel=False,
    ),
]
