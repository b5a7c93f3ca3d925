"""torch's attention as a peer: SDPA on gathered keys and values, FlexAttention on the paged cache.

Loaded by the process of a torch unit only: without torch, its rows say so.
"""

import statistics
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from benchmarks.ops.float64 import SeenRule, attend
from benchmarks.ops.gpu_draws import scattered_tables
from benchmarks.ops.gpu_timing import take_samples
from benchmarks.ops.gpu_units import ERROR_LIMITS, close_findings

_QUERY_TILE = 128
_NUM_SAMPLED_TOKENS = 4


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _draw(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=_device(), dtype=torch.bfloat16)


def _measure(
    attention: Callable[[], torch.Tensor], calls_a_graph: int, budget_s: float
) -> dict[str, Any]:
    """Times calls that draw nothing new: as graphs, which leave out what Python costs, if it can be
    captured.
    """
    replay: Callable[[], Any] = attention
    method = "calls queued one after another, one wait at the end"
    is_cuda = _device().type == "cuda"
    num_each = 1
    if is_cuda:
        try:
            replay = _capture(attention, calls_a_graph).replay
        except RuntimeError as error:
            method += f"; no graph: {str(error).splitlines()[0][:120]}"
        else:
            num_each = calls_a_graph
            method = f"graphs of {num_each} calls, {method}"

    def run(num_calls: int) -> None:
        for _ in range(num_calls):
            replay()
        if is_cuda:
            torch.cuda.synchronize()

    samples = [seconds / num_each for seconds in take_samples(run, budget_s)]
    return {
        "samples_s": samples,
        "median_s": statistics.median(samples),
        "method": method,
        "peer_version": f"torch {torch.__version__}",
    }


def _capture(attention: Callable[[], torch.Tensor], num_calls: int) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            attention()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_calls):
            attention()
    return graph


def measure_sdpa(
    *,
    num_reqs: int,
    num_query: int,
    seq_len: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    seed: int,
    budget_s: float,
) -> dict[str, Any]:
    """`scaled_dot_product_attention` on keys and values that lie in one piece a request."""
    generator = torch.Generator(_device()).manual_seed(seed)
    q = _draw(generator, num_reqs, num_q_heads, num_query, head_dim)
    k, v = (_draw(generator, num_reqs, num_kv_heads, seq_len, head_dim) for _ in range(2))
    is_causal = num_query > 1

    def attention() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=is_causal, enable_gqa=num_q_heads != num_kv_heads
        )

    out = attention()
    findings = _check(out[0], q[0], k[0], v[0])
    return {**_measure(attention, _calls_a_graph(num_query), budget_s), "findings": findings}


def measure_flex(
    *,
    num_reqs: int,
    num_query: int,
    seq_len: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    seed: int,
    budget_s: float,
) -> dict[str, Any]:
    """`flex_attention` over a paged cache: its block mask names each request's physical blocks.

    Only blocks on the diagonal of a prompt are masked within; a decode has none such.
    """
    if seq_len % block_size:
        raise ValueError(f"flex: whole blocks only: got {seq_len=}, {block_size=}")
    device = _device()
    generator = torch.Generator(device).manual_seed(seed)
    tables_np, num_blocks = scattered_tables(
        np.random.default_rng(seed), [seq_len // block_size] * num_reqs
    )
    q = _draw(generator, num_reqs, num_q_heads, num_query, head_dim)
    k, v = (_draw(generator, 1, num_kv_heads, num_blocks * block_size, head_dim) for _ in "kv")
    mask = _paged_mask(tables_np, num_blocks, block_size, num_query)
    # Without a compiler for the device, the mask function alone says what is seen.
    attend_masked = flex_attention
    if device.type == "cuda":
        attend_masked = torch.compile(flex_attention, dynamic=False)

    def attention() -> torch.Tensor:
        return attend_masked(q, k, v, block_mask=mask, enable_gqa=num_q_heads != num_kv_heads)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = attention()
    slots = tables_np[0][:, None] * block_size + np.arange(block_size)
    kept = torch.as_tensor(slots.reshape(-1), device=device)
    findings = _check(out[0], q[0], k[0][:, kept], v[0][:, kept])
    return {**_measure(attention, _calls_a_graph(num_query), budget_s), "findings": findings}


def _paged_mask(
    tables_np: np.ndarray,  # i32[num_reqs, num_blocks_a_req]
    num_blocks: int,
    block_size: int,
    num_query: int,
) -> BlockMask:
    """Which physical blocks each tile of query tokens reads, and which tokens of them.

    Example: block_size 64, a prompt of 256, table [7, 3, 9, 1]. The query tile of tokens 128 to 255
    reads blocks 7 and 3 in full, and 9 and 1, whose tokens stand at 128 to 255, masked.
    """
    num_reqs, num_blocks_a_req = tables_np.shape
    first_position = num_blocks_a_req * block_size - num_query
    num_tiles = -(-num_query // _QUERY_TILE)
    counts_np = np.zeros((2, num_reqs, 1, num_tiles), np.int32)  # masked blocks, full blocks
    # Indices need room for every block of the cache.
    indices_np = np.zeros((2, num_reqs, 1, num_tiles, num_blocks), np.int32)
    for tile in range(num_tiles):
        first = first_position + tile * _QUERY_TILE
        last = min(first + _QUERY_TILE, first_position + num_query) - 1
        num_full = (first + 1) // block_size
        for which, part in enumerate((slice(num_full, last // block_size + 1), slice(num_full))):
            blocks_np = tables_np[:, part]
            counts_np[which, :, 0, tile] = blocks_np.shape[1]
            indices_np[which, :, 0, tile, : blocks_np.shape[1]] = blocks_np
    owner_np = np.full(num_blocks, -1)
    owner_np[tables_np] = np.arange(num_reqs)[:, None]
    logical_np = np.zeros(num_blocks, np.int64)
    logical_np[tables_np] = np.arange(num_blocks_a_req)
    device = _device()
    owner, logical = (torch.as_tensor(x, device=device) for x in (owner_np, logical_np))

    def is_seen(
        req_idx: torch.Tensor, head: torch.Tensor, query: torch.Tensor, slot: torch.Tensor
    ) -> torch.Tensor:
        block_id = slot // block_size
        position = logical[block_id] * block_size + slot % block_size
        return (owner[block_id] == req_idx) & (position <= first_position + query)

    counts, indices = (torch.as_tensor(x, device=device) for x in (counts_np, indices_np))
    return BlockMask.from_kv_blocks(
        *(counts[0], indices[0], counts[1], indices[1]),
        BLOCK_SIZE=(_QUERY_TILE, block_size),
        mask_mod=is_seen,
        seq_lengths=(num_query, num_blocks * block_size),
        compute_q_blocks=False,
    )


def _calls_a_graph(num_query: int) -> int:
    return 1 if num_query > 1 else 4


def _check(
    out: torch.Tensor,  # bf16[num_q_heads, num_query, head_dim]
    q: torch.Tensor,  # likewise
    k: torch.Tensor,  # bf16[num_kv_heads, seq_len, head_dim]
    v: torch.Tensor,  # likewise
) -> list[dict[str, Any]]:
    """Checks the last tokens of the first KV head's query heads, of one request."""
    group_size = q.shape[0] // k.shape[0]
    num_query, seq_len = q.shape[1], k.shape[1]
    first = max(0, num_query - _NUM_SAMPLED_TOKENS)
    q_np, k_np, v_np, out_np = (
        x.float().cpu().numpy().swapaxes(0, 1)
        for x in (q[:group_size, first:], k[:1], v[:1], out[:group_size, first:])
    )
    positions = np.arange(seq_len - num_query + first, seq_len)
    wanted, _ = attend(q_np, k_np, v_np, positions, SeenRule(scale=q.shape[-1] ** -0.5))
    found = close_findings("sampled out", out_np, wanted, ERROR_LIMITS["bfloat16"])
    return [{"what": f.what, "error": f.error, "limit": f.limit} for f in found]
