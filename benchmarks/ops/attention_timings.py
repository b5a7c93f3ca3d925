"""Timings of `paged_attention` on a GPU at full size, compared with cuDNN's attention."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.ops.device_calls import Problem, Work, draw_normal, op_unit
from benchmarks.ops.findings import ERROR_LIMITS, close_findings
from benchmarks.ops.float64 import SeenRule, attend
from benchmarks.units.unit import Finding, Unit

OP = "paged_attention"
DTYPE = "bfloat16"
NUM_SAMPLED_REQS, NUM_SAMPLED_TOKENS, NUM_SAMPLED_KV_HEADS = 3, 12, 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSizes:
    """A batch of full size. `requests` holds (query tokens, seq_len) of each request."""

    case: str
    requests: tuple[tuple[int, int], ...]
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    sliding_window: int | None = None

    @property
    def num_tokens(self) -> int:
        return sum(num_query for num_query, _ in self.requests)

    @property
    def max_query_len(self) -> int:
        return max(num_query for num_query, _ in self.requests)

    @property
    def is_dense(self) -> bool:
        """True if attention over gathered keys computes the same: equal requests, no window."""
        is_prompt = self.max_query_len > 1
        is_uniform = len(set(self.requests)) == 1 and (not is_prompt or len(self.requests) == 1)
        return is_uniform and self.sliding_window is None and self.block_size == 16

    @property
    def rule(self) -> SeenRule:
        return SeenRule(scale=self.head_dim**-0.5, sliding_window=self.sliding_window)

    @property
    def work(self) -> Work:
        """Keys and values that a token sees, queries and outputs, each once; two products."""
        num_keys = sum(seen_keys(*request, self.sliding_window) for request in self.requests)
        num_pairs = sum(seen_pairs(*request, self.sliding_window) for request in self.requests)
        num_heads = num_keys * self.num_kv_heads + self.num_tokens * self.num_q_heads
        return Work(
            num_bytes=2 * 2 * num_heads * self.head_dim,
            num_flops=4 * num_pairs * self.num_q_heads * self.head_dim,
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


def _decode(num_reqs: int, seq_len: int, label: str = "", **sizes: Any) -> AttentionSizes:
    case = f"decode {num_reqs}x{seq_len:,}{label}, block {sizes.get('block_size', 16)}"
    return AttentionSizes(case=case, requests=((1, seq_len),) * num_reqs, **sizes)


def _prompt(label: str = "", **sizes: Any) -> AttentionSizes:
    return AttentionSizes(case=f"prompt 8,192{label}", requests=((8192, 8192),), **sizes)


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
    AttentionSizes(case="32 decodes x 4,096 + chunk of 2,048", requests=_DECODES + _CHUNK),
    AttentionSizes(case="the 32 decodes alone", requests=_DECODES),
    AttentionSizes(case="the chunk alone", requests=_CHUNK),
)
_REHEARSED = AttentionSizes(
    case="decode rehearsal", requests=((1, 70), (1, 70)), num_q_heads=4, num_kv_heads=2, head_dim=64
)


def timing_units(*, is_rehearsal: bool) -> list[Unit]:
    """Our bodies, then JAX's attention with cuDNN on the batches that it can compute."""
    timed = (_REHEARSED,) if is_rehearsal else TIMED
    ours = ("xla",) if is_rehearsal else ("mosaic_gpu", "xla")
    triples = [(sizes, body, _problem) for body in ours for sizes in timed]
    triples += [(sizes, "jax cudnn", _cudnn_problem) for sizes in timed if sizes.is_dense]
    return [
        op_unit("time", OP, sizes.case, body, functools.partial(problem, sizes), sizes.work)
        for sizes, body, problem in triples
    ]


def _problem(sizes: AttentionSizes, seed: int) -> Problem:
    arrays = draw_batch(sizes, seed)
    return Problem(
        arrays=arrays,
        rules={
            "scale": sizes.rule.scale,
            "max_query_len": sizes.max_query_len,
            "sliding_window": sizes.sliding_window,
        },
        verify=lambda out: verify_samples(sizes, arrays, out),
    )


def draw_batch(sizes: AttentionSizes, seed: int) -> tuple[jax.Array, ...]:
    """Arguments of `paged_attention`, drawn on the device; every block lies anywhere."""
    num_needed = [-(-seq_len // sizes.block_size) for _, seq_len in sizes.requests]
    num_blocks = 1 + sum(num_needed)
    block_ids = 1 + np.random.default_rng(seed).permutation(num_blocks - 1)
    tables_np = np.zeros((len(num_needed), max(num_needed)), np.int32)
    for req_idx, end in enumerate(np.cumsum(num_needed)):
        num = num_needed[req_idx]
        tables_np[req_idx, :num] = block_ids[end - num : end]
    cache_shape = (1, num_blocks, sizes.num_kv_heads, sizes.block_size, sizes.head_dim)
    num_query_np = np.array([num_query for num_query, _ in sizes.requests])
    return (
        draw_normal(seed, (sizes.num_tokens, sizes.num_q_heads, sizes.head_dim), DTYPE),
        draw_normal(seed + 1, cache_shape, DTYPE),
        draw_normal(seed + 2, cache_shape, DTYPE),
        jnp.asarray(0, jnp.int32),
        jnp.asarray(tables_np),
        jnp.asarray([seq_len for _, seq_len in sizes.requests], jnp.int32),
        jnp.asarray(np.concatenate([[0], np.cumsum(num_query_np)]), jnp.int32),
    )


def verify_samples(
    sizes: AttentionSizes, arrays: tuple[jax.Array, ...], out: jax.Array
) -> list[Finding]:
    """Checks a few heads of a few tokens of a few requests, and all outputs for NaN."""
    q, k_cache, v_cache, _, tables, _, query_start_loc = arrays
    rng = np.random.default_rng(sizes.num_tokens)
    group_size = sizes.num_q_heads // sizes.num_kv_heads
    kv_heads = np.sort(rng.permutation(sizes.num_kv_heads)[:NUM_SAMPLED_KV_HEADS])
    q_heads = (kv_heads[:, None] * group_size + np.arange(group_size)).reshape(-1)
    # The longest request and some others: the mixed batch has one chunk among many decodes.
    lengths = [num_query for num_query, _ in sizes.requests]
    chosen = {int(np.argmax(lengths)), *rng.permutation(len(lengths))[:NUM_SAMPLED_REQS]}
    got, wanted = [], []
    for req_idx in sorted(map(int, chosen)):
        num_query, seq_len = sizes.requests[req_idx]
        local = np.sort(rng.permutation(num_query)[:NUM_SAMPLED_TOKENS])
        tokens = int(query_start_loc[req_idx]) + local
        table = tables[req_idx, : -(-seq_len // sizes.block_size)]
        keys, values = (
            np.asarray(cache[0, table][:, kv_heads])
            .transpose(0, 2, 1, 3)
            .reshape(-1, len(kv_heads), sizes.head_dim)[:seq_len]
            for cache in (k_cache, v_cache)
        )
        q_np = np.asarray(q[tokens])[:, q_heads]
        wanted.append(attend(q_np, keys, values, seq_len - num_query + local, sizes.rule)[0])
        got.append(np.asarray(out[tokens])[:, q_heads])
    limit = ERROR_LIMITS[DTYPE]
    num_nan = int(jnp.count_nonzero(jnp.isnan(out)))
    return [
        *close_findings("sampled out", np.concatenate(got), np.concatenate(wanted), limit),
        Finding(what="NaN in out", error=float(num_nan), limit=0.0),
    ]


def _cudnn_problem(sizes: AttentionSizes, seed: int) -> Problem:
    """Attention over keys and values that are contiguous per request."""
    num_query, seq_len = sizes.requests[0]
    q_shape = (len(sizes.requests), num_query, sizes.num_q_heads, sizes.head_dim)
    kv_shape = (len(sizes.requests), seq_len, sizes.num_kv_heads, sizes.head_dim)
    q, k, v = (draw_normal(seed + i, s, DTYPE) for i, s in enumerate((q_shape, kv_shape, kv_shape)))

    def verify(out: jax.Array) -> list[Finding]:
        group = slice(sizes.num_q_heads // sizes.num_kv_heads)
        tokens = slice(max(0, num_query - NUM_SAMPLED_TOKENS), num_query)
        kept = [np.asarray(x) for x in (q[0, tokens, group], k[0, :, :1], v[0, :, :1])]
        positions = np.arange(seq_len - num_query, seq_len)[tokens]
        wanted, _ = attend(*kept, positions, sizes.rule)
        got = np.asarray(out[0, tokens, group])
        return close_findings("sampled out", got, wanted, ERROR_LIMITS[DTYPE])

    rules = {"scale": sizes.rule.scale, "is_causal": num_query > 1, "implementation": "cudnn"}
    return Problem(
        arrays=(q, k, v), rules=rules, verify=verify, function=jax.nn.dot_product_attention
    )
