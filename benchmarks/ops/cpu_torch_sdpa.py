"""The peer of the CPU half: torch's attention on keys and values that lie in one piece already."""

from collections.abc import Callable

import numpy as np

from benchmarks.ops.cpu_attention import PagedData, gathered

try:
    import torch
except ImportError:  # an optional peer
    torch = None

HAS_TORCH = torch is not None


def use_one_thread() -> None:
    """Before the first call, if torch is there."""
    if HAS_TORCH:
        torch.set_num_threads(1)


def read_with_torch(buffer: np.ndarray) -> object:
    """Reads all of a buffer."""
    return torch.from_numpy(buffer).sum()


def sdpa_call(data: PagedData, num_rows: int) -> Callable[[int], object]:
    """Attention of the whole batch on row `data_idx`: as few calls as torch allows unpadded.

    Requests of the same shape share a call. One query token needs no mask; a chunk whose query
    tokens are the last of its sequence needs one, because torch's own causal mask counts from the
    first key.
    """
    attention = torch.nn.functional.scaled_dot_product_attention
    starts_np = np.asarray(data.query_start_loc)
    alike: dict[tuple[int, int], list[int]] = {}
    for req_idx, request in enumerate(data.batch.requests):
        alike.setdefault(request, []).append(req_idx)
    groups = []
    for (num_query, seq_len), req_idxs in alike.items():
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
    """What `sdpa_call` returned, laid out as the op's result: to see that it did the same work."""
    starts_np = np.asarray(data.query_start_loc)
    out_np = np.zeros(data.q.shape, np.float32)
    alike: dict[tuple[int, int], list[int]] = {}
    for req_idx, request in enumerate(data.batch.requests):
        alike.setdefault(request, []).append(req_idx)
    for output, ((num_query, _), req_idxs) in zip(outputs, alike.items(), strict=True):
        for of_request, req_idx in zip(output.numpy(), req_idxs, strict=True):
            start = starts_np[req_idx]
            out_np[start : start + num_query] = of_request.transpose(1, 0, 2)
    return out_np


def _by_head(x_np: np.ndarray) -> "torch.Tensor":
    """[num_reqs, num_tokens, num_heads, head_dim] -> contiguous [num_reqs, num_heads, ...]."""
    return torch.from_numpy(np.ascontiguousarray(x_np.transpose(0, 2, 1, 3)))
