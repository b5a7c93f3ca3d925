"""JAX's own attention as a peer: keys and values lie gathered, each request's in one piece."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.ops.float64 import attend
from benchmarks.ops.gpu_attention_speed import DECODE, RAGGED, AttentionSizes, rehearsal_sizes
from benchmarks.ops.gpu_draws import draw_normal, nan
from benchmarks.ops.gpu_units import ERROR_LIMITS, Finding, Program, Unit, close_findings

BODIES = {"jax cudnn": "cudnn", "jax xla dense": "xla"}
_NUM_SAMPLED_TOKENS = 4


def uniform_sizes() -> list[AttentionSizes]:
    """Timed batches that dense attention can do: all requests alike, no window."""
    return [
        sizes
        for sizes in (*DECODE, *RAGGED)
        if (sizes.is_uniform_decode or sizes.is_one_prompt)
        and sizes.sliding_window is None
        # Gathered, block sizes are all alike.
        and sizes.block_size == 16
    ]


def units(*, is_rehearsal: bool) -> list[Unit]:
    return [
        _unit(rehearsal_sizes(sizes) if is_rehearsal else sizes, body)
        for body in (["jax xla dense"] if is_rehearsal else BODIES)
        for sizes in (uniform_sizes()[::5] if is_rehearsal else uniform_sizes())
    ]


def _unit(sizes: AttentionSizes, body: str) -> Unit:
    return Unit(
        kind="time",
        op="paged_attention",
        case=sizes.case,
        body=body,
        program=lambda: _DenseAttention(sizes, BODIES[body]).program(),
        num_bytes=sizes.num_bytes,
        num_flops=sizes.num_flops,
    )


class _DenseAttention:
    """`jax.nn.dot_product_attention` on one batch."""

    def __init__(self, sizes: AttentionSizes, implementation: str) -> None:
        self.sizes = sizes
        self.implementation = implementation

    def program(self) -> Program:
        return Program(make=self.make, step=self.step, verify=self.verify)

    def make(self, seed: int) -> tuple[Any, Any]:
        sizes = self.sizes
        num_query, seq_len = sizes.requests[0]
        num_reqs = len(sizes.requests)
        kv_shape = (num_reqs, seq_len, sizes.num_kv_heads, sizes.head_dim)
        q_shape = (num_reqs, num_query, sizes.num_q_heads, sizes.head_dim)
        inputs = tuple(
            draw_normal(seed + index, shape, sizes.dtype)
            for index, shape in enumerate((q_shape, kv_shape, kv_shape))
        )
        return nan(q_shape, sizes.dtype), inputs

    def step(self, step_idx: jax.Array, state: Any, inputs: Any) -> Any:
        del step_idx, state
        return jax.nn.dot_product_attention(
            *inputs,
            scale=self.sizes.rule.scale,
            is_causal=self.sizes.is_one_prompt,
            implementation=self.implementation,
        )

    def verify(self, state: Any, inputs: Any, last_step_idx: int) -> list[Finding]:
        num_query, seq_len = self.sizes.requests[0]
        rng = np.random.default_rng(last_step_idx)
        req_idx = int(rng.integers(len(self.sizes.requests)))
        tokens = np.sort(rng.permutation(num_query)[:_NUM_SAMPLED_TOKENS])
        group_size = self.sizes.num_q_heads // self.sizes.num_kv_heads
        q, k, v = inputs
        wanted, _ = attend(
            np.asarray(q[req_idx, tokens, :group_size]),
            np.asarray(k[req_idx, :, :1]),
            np.asarray(v[req_idx, :, :1]),
            seq_len - num_query + tokens,
            self.sizes.rule,
        )
        got = np.asarray(state[req_idx, tokens, :group_size])
        limit = ERROR_LIMITS[self.sizes.dtype]
        num_nan = int(jnp.count_nonzero(jnp.isnan(state)))
        return [
            *close_findings("sampled out", got, wanted, limit),
            Finding(what="NaN in out", error=float(num_nan), limit=0.0),
        ]
