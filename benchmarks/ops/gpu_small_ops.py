"""Checks and timings of `slot_mapping` and `merge_attention_states`."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_kernels
from benchmarks.ops.float64 import merge
from benchmarks.ops.gpu_draws import draw_normal, nan
from benchmarks.ops.gpu_units import (
    ERROR_LIMITS,
    Finding,
    Program,
    Unit,
    Wanted,
    close_findings,
    loop_shape,
    same_finding,
)
from benchmarks.ops.gpu_work import merge_bytes, slot_mapping_bytes

_POISON_SLOT = -77


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSizes:
    """A batch of which request r brings `num_new[r]` tokens, behind as many as are drawn."""

    case: str
    num_new: tuple[int, ...]
    num_padding_tokens: int = 5
    num_groups: int = 1
    block_size: int = 16
    max_blocks_per_req: int = 64
    context_parallel: tuple[int, int, int] = (1, 0, 1)  # world size, rank, interleave


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeSizes:
    """Two states of so many tokens; every seventh of one, and every eleventh, saw no keys."""

    case: str
    num_tokens: int
    num_q_heads: int = 32
    v_head_dim: int = 128
    dtype: str = "bfloat16"


_SLOTS_TIMED = SlotSizes(
    case="8,192 tokens of 32 requests",
    num_new=(256,) * 32,
    num_padding_tokens=0,
    max_blocks_per_req=512,
)
_SLOTS_CHECKED = (
    SlotSizes(case="mixed", num_new=(1, 300, 0, 1, 64, 0, 17)),
    SlotSizes(case="3 groups, block 64", num_new=(5, 1, 400), num_groups=3, block_size=64),
    SlotSizes(case="decodes", num_new=(1,) * 200, num_padding_tokens=56),
    SlotSizes(case="padding only", num_new=(0,) * 4, num_padding_tokens=64),
    SlotSizes(case="rank 1 of 2", num_new=(200, 1, 33), context_parallel=(2, 1, 4)),
    SlotSizes(case="rank 3 of 4, block 8", num_new=(90,), block_size=8, context_parallel=(4, 3, 8)),
)
_MERGE_TIMED = MergeSizes(case="8,192 tokens, 32 heads", num_tokens=8192)
_MERGE_CHECKED = (
    MergeSizes(case="bfloat16", num_tokens=333, num_q_heads=8),
    MergeSizes(case="d256", num_tokens=64, num_q_heads=4, v_head_dim=256),
    MergeSizes(case="d80 float32", num_tokens=100, num_q_heads=4, v_head_dim=80, dtype="float32"),
    MergeSizes(case="float16", num_tokens=100, num_q_heads=4, dtype="float16"),
)


def units(*, is_rehearsal: bool) -> list[Unit]:
    """Checks, then timings, of both ops."""
    bodies = ("xla",) if is_rehearsal else ("mosaic_gpu", "xla")
    merge_timed = replace(_MERGE_TIMED, num_tokens=64) if is_rehearsal else _MERGE_TIMED
    return [
        *(_slots(sizes, body, "check") for body in bodies for sizes in _SLOTS_CHECKED),
        *(_merge(sizes, body, "check") for body in bodies for sizes in _MERGE_CHECKED),
        *(_slots(_SLOTS_TIMED, body, "time", is_rehearsal) for body in bodies),
        *(_merge(merge_timed, body, "time", is_rehearsal) for body in bodies),
    ]


def _slots(sizes: SlotSizes, body: str, kind: str, is_rehearsal: bool = False) -> Unit:
    num_reqs, num_tokens = len(sizes.num_new), sum(sizes.num_new) + sizes.num_padding_tokens
    num_bytes = slot_mapping_bytes(sizes.num_groups, num_tokens, num_reqs, sizes.max_blocks_per_req)
    num_steps, calls_per_step = loop_shape(
        num_bytes, 0, is_rehearsal=is_rehearsal, calls_per_step=8
    )
    if kind == "check":
        num_steps, calls_per_step = 1, 1
    return Unit(
        kind=kind,
        op="slot_mapping",
        case=sizes.case,
        body=body,
        program=lambda: _SlotMapping(sizes, body, calls_per_step).program(),
        num_bytes=num_bytes,
        num_steps=num_steps,
        wanted=Wanted(figure="us", values=(10.0,)) if sizes is _SLOTS_TIMED else None,
    )


def _merge(sizes: MergeSizes, body: str, kind: str, is_rehearsal: bool = False) -> Unit:
    num_bytes = merge_bytes(
        sizes.num_tokens, sizes.num_q_heads, sizes.v_head_dim, jnp.dtype(sizes.dtype).itemsize
    )
    num_steps, calls_per_step = loop_shape(num_bytes, 0, is_rehearsal=is_rehearsal)
    if kind == "check":
        num_steps, calls_per_step = 1, 1
    return Unit(
        kind=kind,
        op="merge_attention_states",
        case=sizes.case,
        body=body,
        program=lambda: _Merge(sizes, body, calls_per_step).program(),
        num_bytes=num_bytes,
        num_steps=num_steps,
        highest_precision=sizes.dtype == "float32",
    )


class _SlotMapping:
    """Slots of one batch. In a timing each call waits for the one before, as layers of a model do
    not: it is the time of the op alone that is wanted.
    """

    def __init__(self, sizes: SlotSizes, body: str, calls_per_step: int) -> None:
        self.sizes = sizes
        self.body = body
        self.calls_per_step = calls_per_step
        num_blocks = 1 + sizes.num_groups * len(sizes.num_new) * sizes.max_blocks_per_req
        self.num_blocks = num_blocks
        self.pad_slot = pallas_kernels.pad_slot(2, num_blocks, sizes.block_size)

    def program(self) -> Program:
        return Program(
            make=self.make,
            step=self.step,
            verify=self.verify,
            calls_per_step=self.calls_per_step,
        )

    def make(self, seed: int) -> tuple[Any, Any]:
        sizes = self.sizes
        rng = np.random.default_rng(seed)
        room = sizes.max_blocks_per_req * sizes.block_size * sizes.context_parallel[0]
        positions = [
            np.arange(num_new) + rng.integers(0, room - num_new + 1) for num_new in sizes.num_new
        ]
        positions.append(np.full(sizes.num_padding_tokens, -1))
        positions_np = np.tile(np.concatenate(positions), (sizes.num_groups, 1))
        tables_shape = (sizes.num_groups, len(sizes.num_new), sizes.max_blocks_per_req)
        tables_np = 1 + rng.permutation(self.num_blocks - 1).reshape(tables_shape)
        inputs = {
            "positions": jnp.asarray(positions_np, jnp.int32),
            "block_tables": jnp.asarray(tables_np, jnp.int32),
            "query_start_loc": jnp.asarray(np.cumsum([0, *sizes.num_new]), jnp.int32),
        }
        return jnp.full(positions_np.shape, _POISON_SLOT, jnp.int32), inputs

    def step(self, step_idx: jax.Array, state: Any, inputs: Any) -> Any:
        del step_idx
        world_size, rank, interleave = self.sizes.context_parallel
        for _ in range(self.calls_per_step):
            # No slot is negative, so nothing is added; the compiler does not know, and neither
            # moves a call out of the loop nor runs two at once.
            later = jnp.where(state == _POISON_SLOT, 0, state >> 31)
            state = pallas_kernels.slot_mapping(
                inputs["positions"] + later,
                *(inputs["block_tables"], inputs["query_start_loc"]),
                block_size=self.sizes.block_size,
                pad_slot=self.pad_slot,
                cp_world_size=world_size,
                cp_rank=rank,
                cp_interleave=interleave,
                implementation=self.body,
            )
        return state

    def verify(self, state: Any, inputs: Any, last_step_idx: int) -> list[Finding]:
        del last_step_idx
        sizes = self.sizes
        world_size, rank, interleave = sizes.context_parallel
        positions_np, tables_np = (np.asarray(inputs[x]) for x in ("positions", "block_tables"))
        wanted_np = np.full(positions_np.shape, self.pad_slot, np.int32)
        for group in range(sizes.num_groups):
            token_idx = 0
            for req_idx, num_new in enumerate(sizes.num_new):
                for _ in range(num_new):
                    position = int(positions_np[group, token_idx])
                    block_idx, within = divmod(position, sizes.block_size * world_size)
                    turn, place = divmod(within, world_size * interleave)
                    if place // interleave == rank:
                        offset = turn * interleave + place % interleave
                        block_id = int(tables_np[group, req_idx, block_idx])
                        wanted_np[group, token_idx] = block_id * sizes.block_size + offset
                    token_idx += 1
        return [same_finding("slots", np.asarray(state), wanted_np)]


class _Merge:
    """Two states merged; in a timing, the result is merged with the second again."""

    def __init__(self, sizes: MergeSizes, body: str, calls_per_step: int) -> None:
        self.sizes = sizes
        self.body = body
        self.calls_per_step = calls_per_step

    def program(self) -> Program:
        return Program(
            make=self.make,
            step=self.step,
            verify=self.verify,
            calls_per_step=self.calls_per_step,
        )

    def make(self, seed: int) -> tuple[Any, Any]:
        sizes = self.sizes
        shape = (sizes.num_tokens, sizes.num_q_heads, sizes.v_head_dim)
        parts = []
        for part, period in ((0, 7), (1, 11)):
            lse = 3 * draw_normal(seed + 2 * part, shape[:2], "float32")
            sees_none = (jnp.arange(sizes.num_tokens) % period == 0)[:, None]
            out = draw_normal(seed + 2 * part + 1, shape, sizes.dtype)
            # The output of no keys may be anything.
            out = jnp.where(sees_none[..., None], jnp.asarray(jnp.nan, out.dtype), out)
            parts.append((out, jnp.where(sees_none, -jnp.inf, lse)))
        poison = (nan(shape, sizes.dtype), nan(shape[:2], "float32"))
        return [tuple(jnp.copy(x) for x in poison) for _ in range(self.calls_per_step)], parts

    def step(self, step_idx: jax.Array, state: Any, inputs: Any) -> Any:
        parts, merged = inputs, []
        for call in range(len(state)):
            (out_a, lse_a), (out_b, lse_b) = parts
            # The lse is shifted by the call's number, which changes nothing but which call it is.
            shift = (step_idx * self.calls_per_step + call).astype(jnp.float32)
            state_of_call = pallas_kernels.merge_attention_states(
                *(out_a, lse_a + shift, out_b, lse_b + shift), implementation=self.body
            )
            # Each call waits for the one before: side by side, XLA fuses its calls into one, which
            # reads the inputs once for all of them.
            state_of_call, parts = lax.optimization_barrier((state_of_call, inputs))
            merged.append(state_of_call)
        return merged

    def verify(self, state: Any, inputs: Any, last_step_idx: int) -> list[Finding]:
        shift = last_step_idx * self.calls_per_step
        outs, lses = (
            np.stack([np.asarray(part[index], np.float64) for part in inputs]) for index in (0, 1)
        )
        wanted_out, wanted_lse = merge(outs, lses + shift)
        out_np, lse_np = (np.asarray(x) for x in state[0])
        sees_any = np.isfinite(wanted_lse)
        limit = ERROR_LIMITS[self.sizes.dtype]
        return [
            *close_findings("out", out_np, wanted_out, limit),
            *close_findings("lse", lse_np[sees_any], wanted_lse[sees_any], ERROR_LIMITS["float32"]),
            same_finding("lse of nothing", lse_np[~sees_any], np.float32(wanted_lse[~sees_any])),
        ]
