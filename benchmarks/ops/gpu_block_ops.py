"""Checks and timings of `block_copy`, `block_gather`, `block_scatter`: whole blocks, bit by bit."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from benchmarks.ops.gpu_draws import draw_normal, nan
from benchmarks.ops.gpu_units import Finding, Program, Unit, loop_shape, same_finding
from benchmarks.ops.gpu_work import copied_bytes

OPS = ("block_copy", "block_gather", "block_scatter")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSizes:
    """So many blocks of every row; padding stands among the real ones."""

    case: str
    num_ids: int = 13
    num_padding: int = 4
    num_rows: int = 3
    num_blocks: int = 40
    num_kv_heads: int = 2
    block_size: int = 16
    head_dim: int = 128
    v_head_dim: int = 128
    dtype: str = "bfloat16"


TIMED = BlockSizes(
    case="512 blocks of 8 rows",
    num_ids=512,
    num_padding=0,
    num_rows=8,
    num_blocks=1536,
    num_kv_heads=8,
)
# Copy-on-write: a few blocks a step.
_COPIED = BlockSizes(
    case="64 blocks of 32 rows",
    num_ids=64,
    num_padding=0,
    num_rows=32,
    num_blocks=192,
    num_kv_heads=8,
)
_CHECKED = (
    BlockSizes(case="some"),
    BlockSizes(case="one", num_ids=1, num_padding=0),
    BlockSizes(case="padding only", num_ids=0, num_padding=4),
    BlockSizes(case="block 8, d80", block_size=8, head_dim=80, v_head_dim=80),
    BlockSizes(case="block 256, d256", block_size=256, head_dim=256, v_head_dim=256),
    BlockSizes(case="narrow v", v_head_dim=64, block_size=32),
    BlockSizes(case="float32", dtype="float32"),
    BlockSizes(case="int8", dtype="int8"),
    BlockSizes(case="float8", dtype="float8_e4m3fn", block_size=64),
)


def units(*, is_rehearsal: bool) -> list[Unit]:
    """Checks, then timings, of the three ops."""
    if is_rehearsal:
        small = dataclasses.replace(TIMED, num_ids=5, num_rows=2, num_blocks=16, num_kv_heads=2)
        checks = [(op, _CHECKED[0], "xla") for op in OPS]
        checks += [(op, _CHECKED[0], "mosaic_gpu_interpret") for op in OPS]
        timings = [(op, small, "xla") for op in OPS]
    else:
        bodies = ("mosaic_gpu", "xla")
        checks = [(op, sizes, body) for body in bodies for op in OPS for sizes in _CHECKED]
        timings = [
            (op, _COPIED if op == "block_copy" else TIMED, body) for body in bodies for op in OPS
        ]
    return [
        *(_check(op, sizes, body) for op, sizes, body in checks),
        *(_timing(op, sizes, body, is_rehearsal=is_rehearsal) for op, sizes, body in timings),
    ]


def _check(op: str, sizes: BlockSizes, body: str) -> Unit:
    program = lambda: _BlockOp(op, sizes, body, 1).program()  # noqa: E731
    return Unit(kind="check", op=op, case=sizes.case, body=body, program=program)


def _timing(op: str, sizes: BlockSizes, body: str, *, is_rehearsal: bool) -> Unit:
    num_tokens = sizes.num_ids * sizes.num_rows * sizes.block_size
    itemsize = jnp.dtype(sizes.dtype).itemsize
    num_bytes = copied_bytes(num_tokens, sizes.num_kv_heads, sizes.head_dim, itemsize)
    num_steps, calls_per_step = loop_shape(num_bytes, 0, is_rehearsal=is_rehearsal)
    return Unit(
        kind="time",
        op=op,
        case=sizes.case,
        body=body,
        program=lambda: _BlockOp(op, sizes, body, calls_per_step).program(),
        num_bytes=num_bytes,
        num_steps=num_steps,
    )


class _BlockOp:
    """One op over one cache; called again, it does the same again."""

    def __init__(self, op: str, sizes: BlockSizes, body: str, calls_per_step: int) -> None:
        self.op = op
        self.sizes = sizes
        self.implementation = body
        self.calls_per_step = calls_per_step

    def program(self) -> Program:
        return Program(
            make=self.make,
            step=self.step,
            verify=self.verify,
            calls_per_step=self.calls_per_step,
        )

    def _draw(self, seed: int, num_blocks: int) -> tuple[jax.Array, jax.Array]:
        """K and V of so many blocks of every row."""
        sizes = self.sizes
        leading = (sizes.num_rows, num_blocks, sizes.num_kv_heads, sizes.block_size)
        drawn = (
            draw_normal(seed + 1, (*leading, sizes.head_dim), "float32"),
            draw_normal(seed + 2, (*leading, sizes.v_head_dim), "float32"),
        )
        factor = 30.0 if sizes.dtype == "int8" else 1.0
        return tuple((factor * x).astype(sizes.dtype) for x in drawn)

    def make(self, seed: int) -> tuple[Any, Any]:
        sizes = self.sizes
        rng = np.random.default_rng(seed)
        num_all = sizes.num_ids + sizes.num_padding
        is_real = rng.permutation(num_all) < sizes.num_ids
        # Targets in one half of the cache, sources in the other: done twice, the same comes out.
        half = sizes.num_blocks // 2
        ids_np = sizes.num_blocks + np.arange(num_all)
        ids_np[is_real] = half + rng.permutation(sizes.num_blocks - half)[: sizes.num_ids]
        inputs: dict[str, Any] = {
            "ids": jnp.asarray(ids_np, jnp.int32),
            "seed": jnp.asarray(seed, jnp.int32),
        }
        caches = self._draw(seed, sizes.num_blocks)
        if self.op == "block_copy":
            inputs["sources"] = jnp.asarray(rng.integers(0, half, num_all), jnp.int32)
        elif self.op == "block_scatter":
            inputs["blocks"] = self._draw(seed + 2, num_all)
        else:
            inputs["caches"] = caches
            poisoned = [
                jnp.full(x.shape, 85, "int8") if sizes.dtype == "int8" else nan(x.shape, x.dtype)
                for x in jax.eval_shape(lambda: self._draw(seed, num_all))
            ]
            # A place a call, or the compiler could leave a call out.
            return [
                tuple(jnp.copy(x) for x in poisoned) for _ in range(self.calls_per_step)
            ], inputs
        return caches, inputs

    def step(self, step_idx: jax.Array, state: Any, inputs: Any) -> Any:
        op = getattr(pallas_kernels, self.op)
        chosen = {"implementation": self.implementation}
        if self.op == "block_gather":
            # Calls that read other blocks: the ids turn by one a call.
            return [
                op(
                    *inputs["caches"],
                    jnp.roll(inputs["ids"], step_idx * len(state) + call),
                    **chosen,
                )
                for call in range(len(state))
            ]
        for _ in range(self.calls_per_step):
            if self.op == "block_copy":
                state = op(*state, inputs["sources"], inputs["ids"], **chosen)
            else:
                state = op(*state, *inputs["blocks"], inputs["ids"], **chosen)
        return state

    def verify(self, state: Any, inputs: Any, last_step_idx: int) -> list[Finding]:
        ids_np = np.asarray(inputs["ids"])
        is_real = ids_np < self.sizes.num_blocks
        findings = []
        if self.op == "block_gather":
            turned = np.roll(ids_np, last_step_idx * len(state))
            for name, got, cache in zip(("k", "v"), state[0], inputs["caches"], strict=True):
                cache_np = np.asarray(cache)
                wanted_np = cache_np[:, np.minimum(turned, self.sizes.num_blocks - 1)]
                wanted_np[:, turned >= self.sizes.num_blocks] = 0
                findings.append(same_finding(f"{name} blocks", np.asarray(got), wanted_np))
            return findings
        before = self._draw(inputs["seed"], self.sizes.num_blocks)
        for index, (name, got) in enumerate(zip(("k", "v"), state, strict=True)):
            wanted_np = np.array(before[index])
            if self.op == "block_copy":
                new_np = wanted_np[:, np.asarray(inputs["sources"])[is_real]]
            else:
                new_np = np.asarray(inputs["blocks"][index])[:, is_real]
            wanted_np[:, ids_np[is_real]] = new_np
            findings.append(same_finding(f"{name} cache", np.asarray(got), wanted_np))
        return findings
