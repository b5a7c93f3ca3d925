"""Paged attention by its definition, in float64 NumPy: the results that bodies must have."""

import numpy as np

from pallas_kernels.paged_attention.cases import PagedAttentionInputs


def dense_attention(
    inputs: PagedAttentionInputs,
) -> tuple[np.ndarray, np.ndarray]:
    """Computes attention of one query token at a time, on contiguous keys and values.

    Returns the outputs, f64[num_tokens, num_q_heads, head_dim], and the logarithms of the sums of
    exponentials, f64[num_tokens, num_q_heads]. Without keys, they are 0 and minus infinity.

    The keys that a token sees follow from the contract in `api.py`; blocks are not used.
    """
    q = np.asarray(inputs.q).astype(np.float64)
    rules = inputs.rules
    sinks = None if inputs.sinks is None else np.asarray(inputs.sinks, np.float64)
    query_start_loc = np.asarray(inputs.query_start_loc)
    num_tokens, num_q_heads, _ = q.shape
    num_kv_heads = inputs.kv_cache.shape[2]
    out = np.zeros(q.shape)
    lse = np.full((num_tokens, num_q_heads), -np.inf)
    for req_idx, (keys, values) in enumerate(zip(inputs.keys_np, inputs.values_np, strict=True)):
        start, end = query_start_loc[req_idx], query_start_loc[req_idx + 1]
        # [num_kv_heads, seq_len, head_dim]
        keys, values = (x.astype(np.float64).swapaxes(0, 1) for x in (keys, values))
        num_keys = keys.shape[1]
        for token_idx in range(start, end):
            position = num_keys - (end - token_idx)
            seen = np.flatnonzero(sees(rules, position, np.arange(num_keys)))
            if not seen.size:
                continue
            # Query heads of one KV head are neighbours: [num_kv_heads, group_size, ...].
            queries = q[token_idx].reshape(num_kv_heads, -1, q.shape[-1])
            logits = rules["scale"] * queries @ keys[:, seen].swapaxes(1, 2)
            if rules["soft_cap"] is not None:
                logits = rules["soft_cap"] * np.tanh(logits / rules["soft_cap"])
            weights = np.exp(logits)
            denominators = weights.sum(axis=-1)
            if sinks is not None:
                denominators += np.exp(sinks).reshape(num_kv_heads, -1)
            attended = weights @ values[:, seen] / denominators[..., None]
            out[token_idx] = attended.reshape(num_q_heads, -1)
            lse[token_idx] = np.log(denominators).reshape(-1)
    return out, lse


def sees(
    rules: dict[str, object],
    position: int,
    key_positions: np.ndarray,  # [num_keys]
) -> np.ndarray:  # bool[num_keys]
    """Whether a query token at `position` reads each of the keys."""
    if not rules["is_causal"]:
        return np.ones(len(key_positions), bool)
    is_seen = key_positions <= position
    if rules["sliding_window"] is not None:
        is_seen &= key_positions > position - rules["sliding_window"]
    if rules["chunk_size"] is not None:
        is_seen &= key_positions >= position - position % rules["chunk_size"]
    return is_seen
