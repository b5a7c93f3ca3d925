"""torch's attention on contiguous keys and values, as a peer on the CPU."""

from collections.abc import Callable

import numpy as np

from benchmarks.ops.cpu_attention import PagedData, gathered

try:
    import torch
except ImportError:  # an optional peer
    torch = None

HAS_TORCH = torch is not None


def use_one_thread() -> None:
    """Limits torch to one thread, if torch is installed. Call it before other functions."""
    if HAS_TORCH:
        torch.set_num_threads(1)


def sdpa_call(data: PagedData, num_rows: int) -> Callable[[int], object]:
    """Returns a function that computes attention of the whole batch on one row, without padding.

    Requests of equal shape share a call. A chunk needs a mask, because its query tokens are the
    last of the sequence, and torch's causal mask counts from the first key.
    """
    attention = torch.nn.functional.scaled_dot_product_attention
    starts_np = np.asarray(data.query_start_loc)
    groups = []
    for (num_query, seq_len), req_idxs in _by_shape(data).items():
        q_np = np.stack(
            [np.asarray(data.q)[starts_np[i] : starts_np[i] + num_query] for i in req_idxs]
        )
        mask = torch.ones(num_query, seq_len, dtype=torch.bool).tril(seq_len - num_query)
        pairs = [[gathered(data, row, i) for i in req_idxs] for row in range(num_rows)]
        keys, values = (
            [_by_head(np.stack([pair[which] for pair in row])) for row in pairs] for which in (0, 1)
        )
        groups.append((_by_head(q_np), keys, values, None if num_query == 1 else mask))

    def run(row: int) -> object:
        return [
            attention(q, keys[row], values[row], attn_mask=mask, enable_gqa=True)
            for q, keys, values, mask in groups
        ]

    return run


def tokens_of(data: PagedData, outputs: object) -> np.ndarray:
    """The outputs of `sdpa_call` in the layout of the op's result."""
    starts_np = np.asarray(data.query_start_loc)
    out_np = np.zeros(data.q.shape, np.float32)
    groups = _by_shape(data).items()
    for output, ((num_query, _), req_idxs) in zip(outputs, groups, strict=True):
        for of_request, req_idx in zip(output.numpy(), req_idxs, strict=True):
            start = starts_np[req_idx]
            out_np[start : start + num_query] = of_request.transpose(1, 0, 2)
    return out_np


def _by_shape(data: PagedData) -> dict[tuple[int, int], list[int]]:
    """(query tokens, seq_len) -> indices of the requests of this shape."""
    by_shape: dict[tuple[int, int], list[int]] = {}
    for req_idx, request in enumerate(data.batch.requests):
        by_shape.setdefault(request, []).append(req_idx)
    return by_shape


def _by_head(x_np: np.ndarray) -> "torch.Tensor":
    """[num_reqs, num_tokens, num_heads, head_dim] -> contiguous [num_reqs, num_heads, ...]."""
    return torch.from_numpy(np.ascontiguousarray(x_np.transpose(0, 2, 1, 3)))
