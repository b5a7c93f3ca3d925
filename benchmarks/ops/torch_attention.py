"""torch's `scaled_dot_product_attention` as a peer on the GPU.

Keys and values lie in one piece per request. torch is imported when a unit runs, so a machine
without torch still lists and runs all other units.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.ops.device_calls import take_samples, timed
from benchmarks.ops.findings import ERROR_LIMITS, close_findings
from benchmarks.ops.float64 import SeenRule, attend
from benchmarks.units.unit import Measured

if TYPE_CHECKING:
    from benchmarks.ops.attention_timings import AttentionSizes

_CALLS_PER_GRAPH = 4
_NUM_SAMPLED_TOKENS = 4


def measure_sdpa(sizes: "AttentionSizes", seed: int) -> Measured:
    """Times calls in a CUDA graph, which leaves out Python's cost, and checks the last tokens."""
    import torch  # noqa: PLC0415

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(seed)
    num_query, seq_len = sizes.requests[0]

    def draw(num_heads: int, num_tokens: int) -> torch.Tensor:
        shape = (len(sizes.requests), num_heads, num_tokens, sizes.head_dim)
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    q = draw(sizes.num_q_heads, num_query)
    k, v = draw(sizes.num_kv_heads, seq_len), draw(sizes.num_kv_heads, seq_len)

    def attention() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=num_query > 1, enable_gqa=True
        )

    replay, num_each = attention, 1
    if device.type == "cuda":
        replay, num_each = _captured(attention), _CALLS_PER_GRAPH

    def run(num_calls: int) -> None:
        for _ in range(num_calls):
            replay()
        if device.type == "cuda":
            torch.cuda.synchronize()

    group_size = sizes.num_q_heads // sizes.num_kv_heads
    first = max(0, num_query - _NUM_SAMPLED_TOKENS)
    out = attention()
    q_np, k_np, v_np, got = (
        x.float().cpu().numpy().swapaxes(0, 1)
        for x in (q[0, :group_size, first:], k[0, :1], v[0, :1], out[0, :group_size, first:])
    )
    positions = np.arange(seq_len - num_query + first, seq_len)
    wanted, _ = attend(q_np, k_np, v_np, positions, SeenRule(scale=sizes.head_dim**-0.5))
    return timed(
        [s / num_each for s in take_samples(run)],
        close_findings("sampled out", got, wanted, ERROR_LIMITS["bfloat16"]),
        sizes.work,
        method=f"graphs of {num_each} calls, torch {torch.__version__}",
    )


def _captured(attention: Callable[[], object]) -> Callable[[], None]:
    """Captures calls into a CUDA graph; returns what replays it."""
    import torch  # noqa: PLC0415

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            attention()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS_PER_GRAPH):
            attention()
    return graph.replay
