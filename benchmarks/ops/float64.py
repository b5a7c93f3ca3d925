"""Attention in float64 NumPy, request by request. Every body is checked against it.

It shares no code with the ops: it has no block tables, no tiles and no running maximum.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRule:
    """The rules for the positions that a token sees, and for its logits; see `paged_attention`."""

    scale: float
    is_causal: bool = True
    sliding_window: int | None = None
    chunk_size: int | None = None
    soft_cap: float | None = None

    def is_seen(self, query_positions: np.ndarray, seq_len: int) -> np.ndarray:
        """bool[num_query_tokens, seq_len]."""
        query, key = query_positions[:, None], np.arange(seq_len)[None, :]
        seen = key <= query if self.is_causal else np.ones((len(query), seq_len), bool)
        if self.sliding_window is not None:
            seen &= key > query - self.sliding_window
        if self.chunk_size is not None:
            seen &= key // self.chunk_size == query // self.chunk_size
        return seen


def attend(
    q: np.ndarray,  # f[num_tokens, num_q_heads, head_dim]
    keys: np.ndarray,  # f[seq_len, num_kv_heads, head_dim]
    values: np.ndarray,  # f[seq_len, num_kv_heads, v_head_dim]
    query_positions: np.ndarray,  # i64[num_tokens]
    rule: SeenRule,
    sinks: np.ndarray | None = None,  # f[num_q_heads]
) -> tuple[np.ndarray, np.ndarray]:  # f64[num_tokens, num_q_heads, v_head_dim], f64[num_tokens, ..]
    """Output and log-sum-exp of one request's tokens; zero and -inf where nothing is seen."""
    num_tokens, num_q_heads, _ = q.shape
    seq_len, num_kv_heads, v_head_dim = values.shape
    group_size = num_q_heads // num_kv_heads
    out = np.zeros((num_tokens, num_q_heads, v_head_dim))
    lse = np.full((num_tokens, num_q_heads), -np.inf)
    if seq_len == 0:
        return out, lse
    is_seen = rule.is_seen(np.asarray(query_positions), seq_len)
    sees_any = is_seen.any(axis=1)
    # Unseen keys and values may be NaN, and 0 * NaN is NaN.
    is_used = is_seen.any(axis=0)[:, None]
    for head in range(num_q_heads):
        kv_head = head // group_size
        k = np.where(is_used, keys[:, kv_head].astype(np.float64), 0.0)
        v = np.where(is_used, values[:, kv_head].astype(np.float64), 0.0)
        logits = rule.scale * (q[:, head].astype(np.float64) @ k.T)
        if rule.soft_cap is not None:
            logits = rule.soft_cap * np.tanh(logits / rule.soft_cap)
        logits[~is_seen] = -np.inf
        sink = -np.inf if sinks is None else float(sinks[head])
        highest = np.maximum(logits.max(axis=1), sink)
        highest = np.where(np.isfinite(highest), highest, 0.0)
        weights = np.exp(logits - highest[:, None])
        total = weights.sum(axis=1) + np.exp(sink - highest)
        total = np.where(sees_any, total, 1.0)
        out[:, head] = (weights @ v) / total[:, None]
        lse[:, head] = np.where(sees_any, highest + np.log(total), -np.inf)
    return out, lse


def attend_requests(
    q: np.ndarray,  # f[num_tokens, num_q_heads, head_dim]
    requests: Sequence[tuple[int, int]],  # (query tokens, seq_len)
    keys: Sequence[np.ndarray],
    values: Sequence[np.ndarray],
    rule: SeenRule,
    sinks: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:  # as of `attend`; zero and -inf for padding tokens
    """`attend` for a batch: the last tokens of each request, one request after another."""
    out = np.zeros((*q.shape[:2], values[0].shape[-1]))
    lse = np.full(q.shape[:2], -np.inf)
    start = 0
    for (num_query, seq_len), k, v in zip(requests, keys, values, strict=True):
        tokens = slice(start, start + num_query)
        start += num_query
        positions = np.arange(seq_len - num_query, seq_len)
        out[tokens], lse[tokens] = attend(q[tokens], k, v, positions, rule, sinks)
    return out, lse


def merge(
    outs: np.ndarray,  # f64[num_parts, num_tokens, num_q_heads, v_head_dim]
    lses: np.ndarray,  # f64[num_parts, num_tokens, num_q_heads]
) -> tuple[np.ndarray, np.ndarray]:
    """Attention over the union of parts of the keys, from attention over each part."""
    highest = lses.max(axis=0)
    sees_any = np.isfinite(highest)
    shift = np.where(sees_any, highest, 0.0)
    weights = np.exp(lses - shift)
    total = np.where(sees_any, weights.sum(axis=0), 1.0)
    seen_outs = np.where(weights[..., None] > 0, outs, 0.0)
    out = (weights[..., None] * seen_outs).sum(axis=0) / total[..., None]
    return out, np.where(sees_any, shift + np.log(total), -np.inf)
