"""Checks and timings of `mla_decode`, over a cache of latents that all heads share."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_kernels
from benchmarks.ops.float64 import SeenRule, attend
from benchmarks.ops.gpu_draws import draw_cache, draw_normal, nan, scattered_tables
from benchmarks.ops.gpu_units import (
    ERROR_LIMITS,
    Finding,
    Program,
    Unit,
    Wanted,
    close_findings,
    loop_shape,
)
from benchmarks.ops.gpu_work import mla_bytes, mla_flops

_OP = "mla_decode"
_NUM_ROWS = 2
_NUM_SAMPLED_REQS = 3
# The scale of the head that the latent stands for: 128 + 64 wide, as in DeepSeek V2 and V3.
_SCALE = 192**-0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class MLASizes:
    """Requests of one query token each; a seq_len of 0 is an empty request, without a token."""

    case: str
    seq_lens: tuple[int, ...]
    num_q_heads: int = 16
    num_padding_tokens: int = 0
    latent_dim: int = 512
    rope_dim: int = 64
    block_size: int = 16
    dtype: str = "bfloat16"
    wanted: Wanted | None = None


_TIMED = (
    MLASizes(
        case="64x8,192, 16 heads",
        seq_lens=(8192,) * 64,
        wanted=Wanted(figure="copy_share", values=(0.70,)),
    ),
    # 128 heads do more arithmetic a byte than the device does: the floor is the matrix rate's.
    MLASizes(
        case="64x8,192, 128 heads",
        seq_lens=(8192,) * 64,
        num_q_heads=128,
        wanted=Wanted(figure="floor_share", values=(0.70,)),
    ),
    MLASizes(case="64x8,192, 16 heads, block 64", seq_lens=(8192,) * 64, block_size=64),
)
_LENGTHS = (5, 16, 0, 333, 1, 1025, 64, 2000)
_CHECKED = (
    MLASizes(case="16 heads", seq_lens=_LENGTHS, num_padding_tokens=3),
    MLASizes(case="128 heads, block 64", seq_lens=_LENGTHS, num_q_heads=128, block_size=64),
    MLASizes(case="8 heads, block 8", seq_lens=_LENGTHS, num_q_heads=8, block_size=8),
    MLASizes(case="40 heads, block 32", seq_lens=_LENGTHS, num_q_heads=40, block_size=32),
    MLASizes(case="block 128", seq_lens=_LENGTHS, block_size=128),
    MLASizes(case="one long", seq_lens=(50_000,), block_size=64),
    MLASizes(case="many short", seq_lens=tuple(1 + 7 * i % 190 for i in range(150))),
    MLASizes(case="empty only", seq_lens=(0, 0, 0), num_padding_tokens=5),
    MLASizes(case="float16", seq_lens=_LENGTHS, dtype="float16"),
)
_FLOAT32 = tuple(
    replace(sizes, case=f"{sizes.case} float32", dtype="float32") for sizes in _CHECKED[:3]
)


def units(*, is_rehearsal: bool) -> list[Unit]:
    """Checks, then timings."""
    if is_rehearsal:
        checked = [replace(_CHECKED[0], seq_lens=(5, 0, 40), num_q_heads=4)]
        timed = [replace(sizes, seq_lens=(64,) * 2, num_q_heads=4) for sizes in _TIMED[:1]]
        check_bodies, time_bodies = ("xla", "mosaic_gpu_interpret"), ("xla",)
    else:
        checked, timed = list(_CHECKED), list(_TIMED)
        check_bodies = time_bodies = ("mosaic_gpu", "xla")
    checks = [(sizes, body) for body in check_bodies for sizes in checked]
    if not is_rehearsal:
        checks += [(sizes, "xla") for sizes in _FLOAT32] + [(_CHECKED[0], "default")]
    return [
        *(_check(sizes, body) for sizes, body in checks),
        *(_timing(sizes, body, is_rehearsal) for body in time_bodies for sizes in timed),
    ]


def _check(sizes: MLASizes, body: str) -> Unit:
    return Unit(
        kind="check",
        op=_OP,
        case=sizes.case,
        body=body,
        program=lambda: _MLADecode(sizes, body, 1, is_sampled=False).program(),
        highest_precision=sizes.dtype == "float32",
    )


def _timing(sizes: MLASizes, body: str, is_rehearsal: bool) -> Unit:
    dims = {"latent_dim": sizes.latent_dim, "rope_dim": sizes.rope_dim}
    heads = {"num_q_heads": sizes.num_q_heads, **dims}
    num_bytes = mla_bytes(sizes.seq_lens, **heads, itemsize=jnp.dtype(sizes.dtype).itemsize)
    num_flops = mla_flops(sizes.seq_lens, **heads)
    num_steps, calls_per_step = loop_shape(
        num_bytes, num_flops, is_rehearsal=is_rehearsal, calls_per_step=2
    )
    return Unit(
        kind="time",
        op=_OP,
        case=sizes.case,
        body=body,
        program=lambda: _MLADecode(sizes, body, calls_per_step, is_sampled=True).program(),
        num_bytes=num_bytes,
        num_flops=num_flops,
        num_steps=num_steps,
        wanted=sizes.wanted,
    )


class _MLADecode:
    """One batch. Calls of a step take turns between the rows of the cache."""

    def __init__(
        self, sizes: MLASizes, body: str, calls_per_step: int, *, is_sampled: bool
    ) -> None:
        self.sizes = sizes
        self.implementation = None if body == "default" else body
        self.calls_per_step = calls_per_step
        self.is_sampled = is_sampled

    def program(self) -> Program:
        return Program(
            make=self.make,
            step=self.step,
            verify=self.verify,
            calls_per_step=self.calls_per_step,
        )

    def make(self, seed: int) -> tuple[Any, Any]:
        sizes = self.sizes
        num_query_np = np.array([int(seq_len > 0) for seq_len in sizes.seq_lens])
        num_tokens = int(num_query_np.sum()) + sizes.num_padding_tokens
        needed = [-(-seq_len // sizes.block_size) for seq_len in sizes.seq_lens]
        tables_np, num_blocks = scattered_tables(np.random.default_rng(seed), needed)
        cache_dim = sizes.latent_dim + sizes.rope_dim
        cache = draw_cache(
            seed + 1, (_NUM_ROWS, num_blocks, 1, sizes.block_size, cache_dim), sizes.dtype
        )
        # Behind a sequence's end its last block is as nobody left it.
        for req_idx, seq_len in enumerate(sizes.seq_lens):
            if seq_len % sizes.block_size:
                last_block = int(tables_np[req_idx, needed[req_idx] - 1])
                cache = cache.at[:, last_block, :, seq_len % sizes.block_size :].set(jnp.nan)
        out_shape = (num_tokens, sizes.num_q_heads, sizes.latent_dim)
        inputs = {
            "q": draw_normal(seed, (num_tokens, sizes.num_q_heads, cache_dim), sizes.dtype),
            "kv_cache": cache,
            "block_tables": jnp.asarray(tables_np),
            "seq_lens": jnp.asarray(sizes.seq_lens, jnp.int32),
            "query_start_loc": jnp.asarray(np.concatenate([[0], np.cumsum(num_query_np)]), "int32"),
        }
        return tuple(nan(out_shape, sizes.dtype) for _ in range(self.calls_per_step)), inputs

    def step(self, step_idx: jax.Array, state: Any, inputs: Any) -> Any:
        del state
        names = ("block_tables", "seq_lens", "query_start_loc")
        return tuple(
            pallas_kernels.mla_decode(
                *(inputs["q"], inputs["kv_cache"], self._row(step_idx, call)),
                *(inputs[name] for name in names),
                latent_dim=self.sizes.latent_dim,
                scale=_SCALE,
                implementation=self.implementation,
            )
            for call in range(self.calls_per_step)
        )

    def _row(self, step_idx: jax.Array | int, call: int) -> jax.Array:
        return lax.rem(jnp.asarray(step_idx * self.calls_per_step + call, jnp.int32), _NUM_ROWS)

    def verify(self, state: Any, inputs: Any, last_step_idx: int) -> list[Finding]:
        sizes = self.sizes
        row = int(self._row(last_step_idx, 0))
        starts = np.asarray(inputs["query_start_loc"])
        num_tokens = int(starts[-1])
        req_idxs = np.array([i for i, seq_len in enumerate(sizes.seq_lens) if seq_len], int)
        if self.is_sampled:
            req_idxs = np.random.default_rng(last_step_idx).permutation(req_idxs)
            req_idxs = np.sort(req_idxs[:_NUM_SAMPLED_REQS])
        out_np = np.asarray(state[0])
        wanted = np.zeros((len(req_idxs), sizes.num_q_heads, sizes.latent_dim))
        for index, req_idx in enumerate(req_idxs):
            seq_len = sizes.seq_lens[req_idx]
            table = inputs["block_tables"][req_idx, : -(-seq_len // sizes.block_size)]
            latents_np = np.asarray(inputs["kv_cache"][row, table][:, 0])
            latents_np = latents_np.reshape(-1, 1, latents_np.shape[-1])[:seq_len]
            token = int(starts[req_idx])
            wanted[index] = attend(
                np.asarray(inputs["q"][token : token + 1]),
                latents_np,
                latents_np[..., : sizes.latent_dim],
                np.array([seq_len - 1]),
                SeenRule(scale=_SCALE),
            )[0][0]
        got = out_np[starts[req_idxs]]
        limit = ERROR_LIMITS[sizes.dtype]
        padding = out_np[num_tokens:].astype(np.float32)
        num_nan = sum(int(jnp.count_nonzero(jnp.isnan(out))) for out in state)
        return [
            *close_findings("out", got, wanted, limit),
            Finding(what="NaN in out", error=float(num_nan), limit=0.0),
            Finding(what="out of padding", error=float(np.count_nonzero(padding != 0)), limit=0.0),
        ]
