"""What each op has to do at least: bytes through device memory, and floating-point operations.

Every input counts once, every output once, and of a cache only what is read or written.
"""

from collections.abc import Sequence


def seen_pairs(num_query: int, seq_len: int, sliding_window: int | None = None) -> int:
    """(query token, key) pairs of one request under a causal mask.

    Example: 3 query tokens of 5 stand at positions 2, 3, 4 and see 3 + 4 + 5 = 12 keys; with a
    window of 4, 3 + 4 + 4 = 11.
    """
    first_query = seq_len - num_query
    if sliding_window is None:
        return num_query * first_query + num_query * (num_query + 1) // 2
    num_growing = max(0, min(num_query, sliding_window - first_query))
    growing = num_growing * first_query + num_growing * (num_growing + 1) // 2
    return growing + (num_query - num_growing) * sliding_window


def seen_keys(num_query: int, seq_len: int, sliding_window: int | None = None) -> int:
    """Keys of one request that at least one of its tokens sees."""
    if sliding_window is None or num_query == 0:
        return seq_len if num_query else 0
    return min(seq_len, num_query + sliding_window - 1)


def attention_bytes(
    requests: Sequence[tuple[int, int]],
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
    sliding_window: int | None = None,
    num_common_tokens: int = 0,
) -> int:
    """K and V that are seen, q, and the output.

    Args:
        requests: (query tokens, seq_len) of each request.
        num_common_tokens: Prefix that all requests share, counted once for all of them.
    """
    num_keys = sum(seen_keys(*request, sliding_window) for request in requests)
    num_keys -= num_common_tokens * (len(requests) - 1)
    num_tokens = sum(num_query for num_query, _ in requests)
    cache_bytes = 2 * num_keys * num_kv_heads * head_dim * itemsize
    return cache_bytes + 2 * num_tokens * num_q_heads * head_dim * itemsize


def attention_flops(
    requests: Sequence[tuple[int, int]],
    *,
    num_q_heads: int,
    head_dim: int,
    sliding_window: int | None = None,
) -> int:
    """The products q K and P V of the pairs that the mask leaves, 2 operations a multiply-add."""
    num_pairs = sum(seen_pairs(*request, sliding_window) for request in requests)
    return 4 * num_pairs * num_q_heads * head_dim


def mla_bytes(
    seq_lens: Sequence[int], *, num_q_heads: int, latent_dim: int, rope_dim: int, itemsize: int
) -> int:
    """The latents of every sequence, once for all heads; the query's two parts; the output."""
    cache_bytes = sum(seq_lens) * (latent_dim + rope_dim) * itemsize
    query_bytes = len(seq_lens) * num_q_heads * (latent_dim + rope_dim) * itemsize
    return cache_bytes + query_bytes + len(seq_lens) * num_q_heads * latent_dim * itemsize


def mla_flops(seq_lens: Sequence[int], *, num_q_heads: int, latent_dim: int, rope_dim: int) -> int:
    """Logits over latent and rotary part, outputs over the latent."""
    return 2 * sum(seq_lens) * num_q_heads * (2 * latent_dim + rope_dim)


def copied_bytes(num_tokens: int, num_kv_heads: int, head_dim: int, itemsize: int) -> int:
    """K and V of so many tokens, read once and written once."""
    return 2 * 2 * num_tokens * num_kv_heads * head_dim * itemsize


def slot_mapping_bytes(
    num_groups: int, num_tokens: int, num_reqs: int, max_blocks_per_req: int
) -> int:
    """Positions in, slots out, block tables and query starts in, all int32."""
    num_ints = num_groups * (2 * num_tokens + num_reqs * max_blocks_per_req) + num_reqs + 1
    return 4 * num_ints


def merge_bytes(num_tokens: int, num_q_heads: int, v_head_dim: int, itemsize: int) -> int:
    """Two outputs in, one out; two log-sum-exps in, one out, in float32."""
    return 3 * num_tokens * num_q_heads * (v_head_dim * itemsize + 4)
