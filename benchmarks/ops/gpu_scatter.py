"""Checks and timings of `kv_scatter`: what is written, and that nothing else is."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from benchmarks.ops.gpu_draws import draw_normal, poisoned_cache
from benchmarks.ops.gpu_units import (
    Finding,
    Program,
    Unit,
    Wanted,
    loop_shape,
    relative_error,
    same_finding,
)
from benchmarks.ops.gpu_work import copied_bytes

_OP = "kv_scatter"
# A quantised number may be rounded the other way where x / scale lies next to the middle.
_QUANTISED_LIMIT = 1e-2
_LARGEST_STORED = {"int8": 127.0, "float8_e4m3fn": 448.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScatterSizes:
    """One scatter. Padding tokens stand among the real ones, unless there are none."""

    case: str
    num_tokens: int = 300
    num_padding_tokens: int = 57
    num_rows: int = 3
    row: int = 1
    num_blocks: int = 40
    num_kv_heads: int = 8
    block_size: int = 16
    head_dim: int = 128
    v_head_dim: int = 128
    dtype: str = "bfloat16"
    cache_dtype: str = "bfloat16"
    is_in_runs: bool = False  # prompts fill their blocks; or else every token goes anywhere


TIMED = ScatterSizes(
    case="8,192 tokens",
    num_tokens=8192,
    num_padding_tokens=0,
    num_rows=4,
    row=0,
    num_blocks=2048,
    is_in_runs=True,
)
_TIMED_DECODE = dataclasses.replace(TIMED, case="256 tokens", num_tokens=256, is_in_runs=False)
_TIMED_CASES = ((TIMED, Wanted(figure="copy_share", values=(0.70,))), (_TIMED_DECODE, None))

_CHECKED = (
    ScatterSizes(case="middle row"),
    ScatterSizes(case="first row, block 8, d80", row=0, block_size=8, head_dim=80, v_head_dim=80),
    ScatterSizes(case="last row, block 64, d64", row=2, block_size=64, head_dim=64, v_head_dim=64),
    ScatterSizes(case="d256, 1 head", num_kv_heads=1, head_dim=256, v_head_dim=256),
    ScatterSizes(case="d96, block 256", head_dim=96, v_head_dim=96, block_size=256),
    ScatterSizes(case="d192", head_dim=192, v_head_dim=192, block_size=32),
    ScatterSizes(case="narrow v", v_head_dim=64),
    ScatterSizes(case="every slot", num_tokens=640, num_padding_tokens=0),
    ScatterSizes(case="padding only", num_tokens=0, num_padding_tokens=64),
    ScatterSizes(case="one token", num_tokens=1, num_padding_tokens=0),
    ScatterSizes(case="prompts", is_in_runs=True),
    ScatterSizes(case="float32 into bfloat16", dtype="float32"),
    ScatterSizes(case="float32", dtype="float32", cache_dtype="float32"),
    ScatterSizes(case="float16", dtype="float16", cache_dtype="float16"),
    ScatterSizes(case="int8 cache", cache_dtype="int8"),
    ScatterSizes(case="float8 cache", cache_dtype="float8_e4m3fn"),
)


def units(*, is_rehearsal: bool) -> list[Unit]:
    """Checks, then timings."""
    if is_rehearsal:
        small = dataclasses.replace(TIMED, num_tokens=32, num_blocks=16, num_kv_heads=2)
        checked = [
            dataclasses.replace(sizes, num_tokens=20, num_padding_tokens=3, num_blocks=6)
            for sizes in _CHECKED[:3] + _CHECKED[-2:]
        ]
        return [
            *(_check(sizes, body) for sizes in checked for body in ("xla", "mosaic_gpu_interpret")),
            _timing(small, "xla", None, is_rehearsal=True),
        ]
    bodies = ("mosaic_gpu", "xla")
    checks = [_check(sizes, body) for body in bodies for sizes in _CHECKED]
    checks.append(_check(_CHECKED[0], "default"))
    return checks + [
        _timing(sizes, body, wanted) for body in bodies for sizes, wanted in _TIMED_CASES
    ]


def _check(sizes: ScatterSizes, body: str) -> Unit:
    program = lambda: _Scatter(sizes, body, (sizes.row,)).program()  # noqa: E731
    return Unit(kind="check", op=_OP, case=sizes.case, body=body, program=program)


def _timing(
    sizes: ScatterSizes, body: str, wanted: Wanted | None, *, is_rehearsal: bool = False
) -> Unit:
    itemsize = jnp.dtype(sizes.cache_dtype).itemsize
    num_bytes = copied_bytes(sizes.num_tokens, sizes.num_kv_heads, sizes.head_dim, itemsize)
    num_steps, calls_per_step = loop_shape(num_bytes, 0, is_rehearsal=is_rehearsal)
    rows = tuple(call % sizes.num_rows for call in range(calls_per_step))
    return Unit(
        kind="time",
        op=_OP,
        case=sizes.case,
        body=body,
        program=lambda: _Scatter(sizes, body, rows).program(),
        num_bytes=num_bytes,
        num_steps=num_steps,
        wanted=wanted,
    )


class _Scatter:
    """Writes its own tokens into each of `rows`, one call a row; done again, it changes nothing."""

    def __init__(self, sizes: ScatterSizes, body: str, rows: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.implementation = None if body == "default" else body
        self.rows = rows

    def program(self) -> Program:
        return Program(
            make=self.make, step=self.step, verify=self.verify, calls_per_step=len(self.rows)
        )

    def make(self, seed: int) -> tuple[Any, Any]:
        sizes = self.sizes
        leading = (sizes.num_rows, sizes.num_blocks, sizes.num_kv_heads, sizes.block_size)
        caches = tuple(
            poisoned_cache((*leading, head_dim), sizes.cache_dtype)
            for head_dim in (sizes.head_dim, sizes.v_head_dim)
        )
        return caches, [self._draw_call(seed + 3 * call) for call in range(len(self.rows))]

    def _draw_call(self, seed: int) -> dict[str, Any]:
        sizes = self.sizes
        num_all = sizes.num_tokens + sizes.num_padding_tokens
        drawn = {"slots": jnp.asarray(_draw_slots(np.random.default_rng(seed), sizes))}
        for name, head_dim in (("k", sizes.head_dim), ("v", sizes.v_head_dim)):
            seed += 1
            drawn[name] = draw_normal(seed, (num_all, sizes.num_kv_heads, head_dim), sizes.dtype)
            if sizes.cache_dtype in _LARGEST_STORED:
                # A scale by which numbers up to 3 fit; larger ones are clipped.
                wide = jnp.linspace(2.0, 3.0, sizes.num_kv_heads, dtype=jnp.float32)
                drawn[f"{name}_scale"] = wide / _LARGEST_STORED[sizes.cache_dtype]
        return drawn

    def step(self, step_idx: jax.Array, state: Any, inputs: Any) -> Any:
        del step_idx
        for row, drawn in zip(self.rows, inputs, strict=True):
            scales = {name: x for name, x in drawn.items() if name.endswith("scale")}
            state = pallas_kernels.kv_scatter(
                *state,
                *(drawn["k"], drawn["v"], drawn["slots"], jnp.asarray(row, jnp.int32)),
                implementation=self.implementation,
                **scales,
            )
        return state

    def verify(self, state: Any, inputs: Any, last_step_idx: int) -> list[Finding]:
        del last_step_idx
        findings = []
        for name, cache in zip(("k", "v"), state, strict=True):
            wanted_np = np.array(poisoned_cache(cache.shape, self.sizes.cache_dtype))
            for row, drawn in zip(self.rows, inputs, strict=True):
                self._write(wanted_np[row], drawn, name)
            got_np = np.asarray(cache)
            if self.sizes.cache_dtype in _LARGEST_STORED:
                findings += _near(f"{name} cache", got_np, wanted_np)
            else:
                findings.append(same_finding(f"{name} cache", got_np, wanted_np))
        return findings

    def _write(self, row_np: np.ndarray, drawn: dict[str, Any], name: str) -> None:
        """Writes as the op should into one row, `[num_blocks, num_kv_heads, block_size, dim]`."""
        new_np = np.asarray(drawn[name])
        if self.sizes.cache_dtype in _LARGEST_STORED:
            largest = _LARGEST_STORED[self.sizes.cache_dtype]
            scale_np = np.asarray(drawn[f"{name}_scale"], np.float64)[:, None]
            new_np = np.clip(new_np.astype(np.float64) / scale_np, -largest, largest)
            new_np = np.rint(new_np) if self.sizes.cache_dtype == "int8" else new_np
            # Through float32: ml_dtypes rounds float64 to float8 in one step, JAX from float32.
            new_np = new_np.astype(np.float32)
        slots_np = np.asarray(drawn["slots"])
        is_real = slots_np < self.sizes.num_blocks * self.sizes.block_size
        block_ids, offsets = np.divmod(slots_np[is_real], self.sizes.block_size)
        row_np[block_ids, :, offsets] = new_np[is_real].astype(row_np.dtype)


def _draw_slots(rng: np.random.Generator, sizes: ScatterSizes) -> np.ndarray:
    """i32[num_tokens + num_padding_tokens], no two alike; padding from the padding slot on."""
    num_all = sizes.num_tokens + sizes.num_padding_tokens
    past_the_end = pallas_kernels.pad_slot(sizes.num_rows, sizes.num_blocks, sizes.block_size)
    slots_np = past_the_end + np.arange(num_all)
    if sizes.is_in_runs:
        token_idx = np.arange(sizes.num_tokens)
        block_ids = rng.permutation(sizes.num_blocks)[token_idx // sizes.block_size]
        slots_np[: sizes.num_tokens] = block_ids * sizes.block_size + token_idx % sizes.block_size
    else:
        real_tokens = np.sort(rng.permutation(num_all)[: sizes.num_tokens])
        all_slots = rng.permutation(sizes.num_blocks * sizes.block_size)
        slots_np[real_tokens] = all_slots[: sizes.num_tokens]
    return slots_np.astype(np.int32)


def _near(what: str, got_np: np.ndarray, wanted_np: np.ndarray) -> list[Finding]:
    got, wanted = got_np.astype(np.float64), wanted_np.astype(np.float64)
    is_poison = np.isnan(wanted)
    untouched = Finding(
        what=f"poison left in the {what}",
        error=float(np.count_nonzero(np.isnan(got) != is_poison)),
        limit=0.0,
    )
    error = relative_error(got[~is_poison], wanted[~is_poison])
    return [untouched, Finding(what=what, error=error, limit=_QUANTISED_LIMIT)]
