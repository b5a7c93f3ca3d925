"""Timings of `paged_attention` on a GPU at full size."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.ops.attention_checks import seen_rule
from benchmarks.ops.device_calls import Problem, Work, draw_normal
from benchmarks.ops.findings import ERROR_LIMITS, close_findings
from benchmarks.ops.float64 import attend
from benchmarks.units.unit import Finding
from pallas_kernels.paged_attention.cases import PagedAttentionCase

DTYPE = "bfloat16"
NUM_SAMPLED_REQS, NUM_SAMPLED_TOKENS, NUM_SAMPLED_KV_HEADS = 3, 12, 2


def work_of(case: PagedAttentionCase) -> Work:
    """Bytes of all seen keys and values, queries and outputs, each once; flops of two products."""
    num_keys = sum(seen_keys(*request, case.sliding_window) for request in case.requests)
    num_pairs = sum(seen_pairs(*request, case.sliding_window) for request in case.requests)
    num_heads = num_keys * case.num_kv_heads + _num_tokens(case) * case.num_q_heads
    return Work(
        num_bytes=2 * 2 * num_heads * case.head_dim,
        num_flops=4 * num_pairs * case.num_q_heads * case.head_dim,
    )


def seen_pairs(num_query: int, seq_len: int, sliding_window: int | None = None) -> int:
    """(query token, key) pairs of one request under a causal mask.

    Example: 3 query tokens of 5 are at positions 2, 3, 4 and see 3 + 4 + 5 = 12 keys; with a window
    of 4, 3 + 4 + 4 = 11.
    """
    num_seen = np.arange(seq_len - num_query, seq_len) + 1
    return int(np.minimum(num_seen, sliding_window or seq_len).sum())


def seen_keys(num_query: int, seq_len: int, sliding_window: int | None = None) -> int:
    """Keys of one request that at least one of its query tokens sees."""
    return min(seq_len, num_query + (sliding_window or seq_len) - 1) if num_query else 0


def _num_tokens(case: PagedAttentionCase) -> int:
    return sum(num_query for num_query, _ in case.requests)


def _case(name: str, requests: tuple[tuple[int, int], ...], **sizes: Any) -> PagedAttentionCase:
    defaults = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": DTYPE}
    return PagedAttentionCase(name=name, requests=requests, **(defaults | sizes))


def _decode(num_reqs: int, seq_len: int, label: str = "", **sizes: Any) -> PagedAttentionCase:
    name = f"decode {num_reqs}x{seq_len:,}{label}, block {sizes.get('block_size', 16)}"
    return _case(name, ((1, seq_len),) * num_reqs, **sizes)


def _prompt(label: str = "", **sizes: Any) -> PagedAttentionCase:
    return _case(f"prompt 8,192{label}", ((8192, 8192),), **sizes)


_GEMMA = {"num_q_heads": 16, "num_kv_heads": 8, "head_dim": 256}
_DECODES, _CHUNK = ((1, 4096),) * 32, ((2048, 2048),)
TIMED = (
    _decode(64, 8192),
    _decode(64, 8192, block_size=64),
    _decode(8, 32_768),
    _decode(256, 1024),
    _decode(1, 131_072),
    _decode(64, 8192, ", Gemma heads", **_GEMMA),
    _decode(64, 8192, ", window 1,024", sliding_window=1024),
    _prompt(),
    _prompt(", block 64", block_size=64),
    _prompt(", Gemma heads", **_GEMMA),
    _prompt(", window 1,024", sliding_window=1024),
    _case("32 decodes x 4,096 + chunk of 2,048", _DECODES + _CHUNK),
    _case("the 32 decodes alone", _DECODES),
    _case("the chunk alone", _CHUNK),
)


def timed_problem(case: PagedAttentionCase, seed: int) -> Problem:
    arrays = draw_batch(case, seed)
    max_query_len = max(num_query for num_query, _ in case.requests)
    return Problem(
        arrays=arrays,
        rules={**dataclasses.asdict(seen_rule(case)), "max_query_len": max_query_len},
        verify=lambda out: verify_samples(case, arrays, out),
    )


def draw_batch(case: PagedAttentionCase, seed: int) -> tuple[jax.Array, ...]:
    """Arguments of `paged_attention`, drawn on the device; blocks are at random places."""
    num_needed = [-(-seq_len // case.block_size) for _, seq_len in case.requests]
    num_blocks = 1 + sum(num_needed)
    block_ids = 1 + np.random.default_rng(seed).permutation(num_blocks - 1)
    tables_np = np.zeros((len(num_needed), max(num_needed)), np.int32)
    for req_idx, end in enumerate(np.cumsum(num_needed)):
        num = num_needed[req_idx]
        tables_np[req_idx, :num] = block_ids[end - num : end]
    cache_shape = (1, 2 * num_blocks, case.num_kv_heads, case.block_size, case.head_dim)
    num_query_np = np.array([num_query for num_query, _ in case.requests])
    return (
        draw_normal(seed, (_num_tokens(case), case.num_q_heads, case.head_dim), DTYPE),
        draw_normal(seed + 1, cache_shape, DTYPE),
        jnp.asarray(0, jnp.int32),
        jnp.asarray(tables_np),
        jnp.asarray([seq_len for _, seq_len in case.requests], jnp.int32),
        jnp.asarray(np.concatenate([[0], np.cumsum(num_query_np)]), jnp.int32),
    )


def verify_samples(
    case: PagedAttentionCase, arrays: tuple[jax.Array, ...], out: jax.Array
) -> list[Finding]:
    """Checks a few heads of a few tokens of a few requests, and all outputs for NaN."""
    q, kv_cache, _, tables, _, query_start_loc = arrays
    rng = np.random.default_rng(_num_tokens(case))
    group_size = case.num_q_heads // case.num_kv_heads
    kv_heads = np.sort(rng.permutation(case.num_kv_heads)[:NUM_SAMPLED_KV_HEADS])
    q_heads = (kv_heads[:, None] * group_size + np.arange(group_size)).reshape(-1)
    # The longest request and some others: the mixed batch has one chunk among many decodes.
    lengths = [num_query for num_query, _ in case.requests]
    chosen = {int(np.argmax(lengths)), *rng.permutation(len(lengths))[:NUM_SAMPLED_REQS]}
    got, wanted = [], []
    for req_idx in sorted(map(int, chosen)):
        num_query, seq_len = case.requests[req_idx]
        local = np.sort(rng.permutation(num_query)[:NUM_SAMPLED_TOKENS])
        tokens = int(query_start_loc[req_idx]) + local
        table = tables[req_idx, : -(-seq_len // case.block_size)]
        keys, values = (
            np.asarray(kv_cache[0, 2 * table + part][:, kv_heads])
            .transpose(0, 2, 1, 3)
            .reshape(-1, len(kv_heads), case.head_dim)[:seq_len]
            for part in (0, 1)
        )
        q_np = np.asarray(q[tokens])[:, q_heads]
        wanted.append(attend(q_np, keys, values, seq_len - num_query + local, seen_rule(case))[0])
        got.append(np.asarray(out[tokens])[:, q_heads])
    limit = ERROR_LIMITS[DTYPE]
    num_nan = int(jnp.count_nonzero(jnp.isnan(out)))
    return [
        *close_findings("sampled out", np.concatenate(got), np.concatenate(wanted), limit),
        Finding(what="NaN in out", error=float(num_nan), limit=0.0),
    ]
