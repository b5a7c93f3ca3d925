"""Timings of `paged_attention` and `cascade_attention` at full size, each checked on samples."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
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
from benchmarks.ops.gpu_work import attention_bytes, attention_flops

# Two rows of the cache take turns, so that no call finds in L2 what the one before it read.
NUM_ROWS = 2
NUM_SAMPLED_REQS = 3
NUM_SAMPLED_TOKENS = 12
NUM_SAMPLED_KV_HEADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSizes:
    """A batch of full size. `requests` holds (query tokens, seq_len) of each request."""

    case: str
    requests: tuple[tuple[int, int], ...]
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    dtype: str = "bfloat16"
    sliding_window: int | None = None
    num_common_tokens: int = 0  # a prefix that all requests share; for the cascade
    wanted: Wanted | None = None

    @property
    def num_tokens(self) -> int:
        return sum(num_query for num_query, _ in self.requests)

    @property
    def max_query_len(self) -> int:
        return max(num_query for num_query, _ in self.requests)

    @property
    def is_uniform_decode(self) -> bool:
        return self.max_query_len == 1 and len({seq_len for _, seq_len in self.requests}) == 1

    @property
    def is_one_prompt(self) -> bool:
        return len(self.requests) == 1 and self.requests[0][0] == self.requests[0][1]

    @property
    def rule(self) -> SeenRule:
        return SeenRule(scale=self.head_dim**-0.5, sliding_window=self.sliding_window)

    @property
    def num_bytes(self) -> int:
        return attention_bytes(
            self.requests,
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            itemsize=jnp.dtype(self.dtype).itemsize,
            sliding_window=self.sliding_window,
            num_common_tokens=self.num_common_tokens,
        )

    @property
    def num_flops(self) -> int:
        return attention_flops(
            self.requests,
            num_q_heads=self.num_q_heads,
            head_dim=self.head_dim,
            sliding_window=self.sliding_window,
        )


def _decode(
    num_reqs: int, seq_len: int, wanted: float | None = None, **sizes: Any
) -> AttentionSizes:
    block_size = sizes.get("block_size", 16)
    label = f"{num_reqs}x{seq_len:,}" + (", Gemma heads" if "head_dim" in sizes else "")
    return AttentionSizes(
        case=f"decode {label}, block {block_size}",
        requests=((1, seq_len),) * num_reqs,
        wanted=wanted and Wanted(figure="copy_share", values=(wanted,)),
        **sizes,
    )


GEMMA_HEADS = {"num_q_heads": 16, "num_kv_heads": 8, "head_dim": 256}
DECODE = (
    _decode(64, 8192, 0.85),
    _decode(64, 8192, 0.85, block_size=64),
    _decode(8, 32_768, 0.80),
    _decode(256, 1024, 0.70),
    _decode(1, 131_072),
    _decode(64, 8192, **GEMMA_HEADS),
    dataclasses.replace(
        _decode(64, 8192), case="decode 64x8,192, window 1,024", sliding_window=1024
    ),
)

MIXED_CASE = "ragged 32 decodes x 4,096 + chunk of 2,048"
MIXED_PARTS = ("ragged, the 32 decodes alone", "ragged, the chunk alone")
_DECODES, _CHUNK = ((1, 4096),) * 32, ((2048, 2048),)
RAGGED = (
    AttentionSizes(
        case="ragged prompt 8,192",
        requests=((8192, 8192),),
        wanted=Wanted(figure="tflops", values=(450.0, 600.0)),
    ),
    AttentionSizes(case=MIXED_CASE, requests=_DECODES + _CHUNK),
    AttentionSizes(case=MIXED_PARTS[0], requests=_DECODES),
    AttentionSizes(case=MIXED_PARTS[1], requests=_CHUNK),
    AttentionSizes(case="ragged prompt 8,192, block 64", requests=((8192, 8192),), block_size=64),
    AttentionSizes(
        case="ragged prompt 8,192, Gemma heads", requests=((8192, 8192),), **GEMMA_HEADS
    ),
    AttentionSizes(
        case="ragged prompt 8,192, window 1,024", requests=((8192, 8192),), sliding_window=1024
    ),
)
CASCADE = AttentionSizes(
    case="64 decodes, 8,192 common + 256 own",
    requests=((1, 8448),) * 64,
    num_common_tokens=8192,
)


def rehearsal_sizes(sizes: AttentionSizes) -> AttentionSizes:
    """The same batch in small, for a machine without a GPU."""
    return dataclasses.replace(
        sizes,
        requests=tuple(
            (max(1, num_query // 128), max(1, num_query // 128, seq_len // 128))
            for num_query, seq_len in (*sizes.requests[:2], *sizes.requests[-1:])
        )[: len(sizes.requests)],
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=sizes.head_dim // 2,
        block_size=min(sizes.block_size, 16),
        sliding_window=sizes.sliding_window and 5,
        num_common_tokens=sizes.num_common_tokens // 256,
    )


def timing_units(*, is_rehearsal: bool) -> list[Unit]:
    """Decode, ragged and cascade timings of our bodies, the wanted ones first."""
    if is_rehearsal:
        timed = [(sizes, "xla") for sizes in (DECODE[0], DECODE[-1], *RAGGED[:4])]
        timed += [(DECODE[0], "reference")]
        bodies: tuple[str, ...] = ("xla",)
    else:
        bodies = ("mosaic_gpu", "xla")
        timed = [(sizes, body) for body in bodies for sizes in (*DECODE, *RAGGED)]
    timed = [(*unit, "paged_attention") for unit in timed]
    timed += [(CASCADE, body, "cascade_attention") for body in bodies]
    # The same batch without the cascade: what the op has to beat.
    timed.append((CASCADE, bodies[0], "paged_attention"))
    return [
        attention_timing(sizes, body, is_rehearsal=is_rehearsal, op=op) for sizes, body, op in timed
    ]


_CASCADE_CHECKED = (
    AttentionSizes(
        case="decodes, 256 common", requests=((1, 300), (1, 777), (1, 257)), num_common_tokens=256
    ),
    AttentionSizes(
        case="decodes and a chunk, 512 common",
        requests=((1, 700), (100, 1000), (1, 530), (7, 519)),
        num_common_tokens=512,
        num_q_heads=8,
        num_kv_heads=2,
    ),
)


def cascade_checks(*, is_rehearsal: bool) -> list[Unit]:
    """Cascades in small, checked as the timings are."""
    bodies = ("xla",) if is_rehearsal else ("mosaic_gpu", "default", "xla")
    return [
        Unit(
            kind="check",
            op="cascade_attention",
            case=sizes.case,
            body=body,
            program=lambda sizes=sizes, body=body: _AttentionTiming(
                sizes, body, "cascade_attention", calls_per_step=1
            ).program(),
        )
        for body in bodies
        for sizes in _CASCADE_CHECKED
    ]


def attention_timing(
    sizes: AttentionSizes,
    body: str,
    *,
    is_rehearsal: bool,
    op: str = "paged_attention",
    attention: Callable[..., jax.Array] | None = None,
) -> Unit:
    """The unit that times a body, or `attention` instead of one, which takes the op's arguments."""
    if is_rehearsal:
        sizes = rehearsal_sizes(sizes)
    num_steps, calls_per_step = loop_shape(
        sizes.num_bytes, sizes.num_flops, is_rehearsal=is_rehearsal, calls_per_step=2
    )
    return Unit(
        kind="time",
        op=op,
        case=sizes.case,
        body=body,
        program=lambda: _AttentionTiming(sizes, body, op, calls_per_step, attention).program(),
        num_bytes=sizes.num_bytes,
        num_flops=sizes.num_flops,
        num_steps=num_steps,
        wanted=sizes.wanted,
    )


class _AttentionTiming:
    """One batch, and the rows of the cache that a step reads."""

    def __init__(
        self,
        sizes: AttentionSizes,
        body: str,
        op: str,
        calls_per_step: int,
        attention: Callable[..., jax.Array] | None = None,
    ) -> None:
        self.sizes = sizes
        self.body = body
        self.attention = attention
        self.op = op
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
        rng = np.random.default_rng(seed)
        num_common_blocks = sizes.num_common_tokens // sizes.block_size
        tables_np, num_blocks = scattered_tables(
            rng, [-(-seq_len // sizes.block_size) for _, seq_len in sizes.requests]
        )
        tables_np[:, :num_common_blocks] = tables_np[0, :num_common_blocks]
        cache_shape = (NUM_ROWS, num_blocks, sizes.num_kv_heads, sizes.block_size, sizes.head_dim)
        num_query_np = np.array([num_query for num_query, _ in sizes.requests])
        q_shape = (sizes.num_tokens, sizes.num_q_heads, sizes.head_dim)
        inputs = {
            "q": draw_normal(seed, q_shape, sizes.dtype),
            "k_cache": draw_cache(seed + 1, cache_shape, sizes.dtype),
            "v_cache": draw_cache(seed + 2, cache_shape, sizes.dtype),
            "block_tables": jnp.asarray(tables_np),
            "seq_lens": jnp.asarray([seq_len for _, seq_len in sizes.requests], jnp.int32),
            "query_start_loc": jnp.asarray(np.concatenate([[0], np.cumsum(num_query_np)]), "int32"),
            "num_common_blocks": jnp.asarray(num_common_blocks, jnp.int32),
        }
        return tuple(nan(q_shape, sizes.dtype) for _ in range(self.calls_per_step)), inputs

    def step(self, step_idx: jax.Array, state: Any, inputs: Any) -> Any:
        """A call a place of the state: were one overwritten, the compiler could leave it out."""
        del state
        names = ("block_tables", "seq_lens", "query_start_loc")
        options: dict[str, Any] = {
            "scale": self.sizes.rule.scale,
            "max_query_len": self.sizes.max_query_len,
            "implementation": None if self.body == "default" else self.body,
        }
        arrays = [inputs[name] for name in names]
        if self.op == "cascade_attention":
            arrays.append(inputs["num_common_blocks"])
        else:
            options["sliding_window"] = self.sizes.sliding_window
        attention = self.attention or getattr(pallas_kernels, self.op)
        return tuple(
            attention(
                *(inputs["q"], inputs["k_cache"], inputs["v_cache"]),
                self._row(step_idx, call),
                *arrays,
                **options,
            )
            for call in range(self.calls_per_step)
        )

    def _row(self, step_idx: jax.Array | int, call: int) -> jax.Array:
        return lax.rem(jnp.asarray(step_idx * self.calls_per_step + call, jnp.int32), NUM_ROWS)

    def verify(self, state: Any, inputs: Any, last_step_idx: int) -> list[Finding]:
        """A few tokens' heads of the first call of the last step; that none is NaN, of all."""
        sizes = self.sizes
        rng = np.random.default_rng(last_step_idx)
        row = int(self._row(last_step_idx, 0))
        group_size = sizes.num_q_heads // sizes.num_kv_heads
        num_heads = min(NUM_SAMPLED_KV_HEADS, sizes.num_kv_heads)
        kv_heads = np.sort(rng.permutation(sizes.num_kv_heads)[:num_heads])
        q_heads = (kv_heads[:, None] * group_size + np.arange(group_size)).reshape(-1)
        starts = np.asarray(inputs["query_start_loc"])
        # The longest request and some others: a chunk stands beside decodes in the mixed batch.
        lengths = [num_query for num_query, _ in sizes.requests]
        chosen = {int(np.argmax(lengths)), *rng.permutation(len(lengths))[:NUM_SAMPLED_REQS]}
        got, wanted = [], []
        for req_idx in sorted(int(index) for index in chosen):
            num_query, seq_len = sizes.requests[req_idx]
            local = np.sort(rng.permutation(num_query)[:NUM_SAMPLED_TOKENS])
            tokens = starts[req_idx] + local
            table = inputs["block_tables"][req_idx, : -(-seq_len // sizes.block_size)]
            keys, values = (
                np.asarray(inputs[name][row, table][:, kv_heads])
                .transpose(0, 2, 1, 3)
                .reshape(-1, num_heads, sizes.head_dim)[:seq_len]
                for name in ("k_cache", "v_cache")
            )
            q_np = np.asarray(inputs["q"][tokens])[:, q_heads]
            wanted.append(attend(q_np, keys, values, seq_len - num_query + local, sizes.rule)[0])
            got.append(np.asarray(state[0][tokens])[:, q_heads])
        num_nan = sum(int(jnp.count_nonzero(jnp.isnan(out))) for out in state)
        limit = ERROR_LIMITS[sizes.dtype]
        return [
            *close_findings("sampled out", np.concatenate(got), np.concatenate(wanted), limit),
            Finding(what="NaN in out", error=float(num_nan), limit=0.0),
        ]
