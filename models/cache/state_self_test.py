"""`StateSelfTest`: compares the kernels that advance states in pages with plain XLA."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from models.cache.self_test import MAX_RELATIVE_ERROR, relative_error
from pallas_kernels import PagedStates

StepOp = Literal["gated_delta_step", "selective_step", "ssd_step"]

_NUM_REQS, _NUM_HEADS = 4, 2
# Pages of these sizes end within the states of most models. The kernels of `gated_delta_step` and
# `ssd_step` load 16 lines at a time, or 4 where a page boundary would cut 16.
_LINES_PER_PAGE = (48, 12)
# The kernel of `selective_step` loads 256 numbers of a line at a time, or 128 if lines or pages are
# not multiples of 256.
_SELECTIVE_PAGE_SIZES = (48 * 128, 47 * 128)
_ROW = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateSelfTest:
    """One step of an op. A head's state is `num_lines` lines of `line_size` numbers."""

    op: StepOp
    num_lines: int
    line_size: int
    dtype: str  # of the states; the pages are bfloat16
    page_size: int  # in numbers of the states
    has_decay_per_row: bool = False

    @classmethod
    def all_of(cls, op: StepOp, shape: tuple[int, ...], dtype: str) -> tuple["StateSelfTest", ...]:
        """The tests of `op` for states of `shape`: one for each page size and each kind of decay
        that the op takes.
        """
        _, num_lines, line_size = shape
        page_sizes = tuple(num * line_size for num in _LINES_PER_PAGE)
        if op == "selective_step":
            page_sizes = _SELECTIVE_PAGE_SIZES
        kinds_of_decay = (False, True) if op == "gated_delta_step" else (False,)
        return tuple(
            cls(
                op=op,
                num_lines=num_lines,
                line_size=line_size,
                dtype=dtype,
                page_size=page_size,
                has_decay_per_row=has_decay_per_row,
            )
            for page_size in page_sizes
            for has_decay_per_row in kinds_of_decay
        )

    def why_kernels_differ(
        self, target: pallas_kernels.Target, *, implementation: str | None = None
    ) -> str | None:
        """See `SelfTest.why_kernels_differ`."""
        expected = self._run({"implementation": "xla", "target": target})
        got = self._run({"implementation": implementation, "target": target})
        for what, got_np, expected_np in zip(("results", "states"), got, expected, strict=True):
            difference = relative_error(got_np, expected_np)
            if not difference <= MAX_RELATIVE_ERROR:  # NaN is not
                return (
                    f"{what} of {self.op} differ from XLA's by {difference:.3g} of their norm, "
                    f"more than {MAX_RELATIVE_ERROR}"
                )
        return None

    def _run(self, chosen: dict[str, object]) -> tuple[np.ndarray, np.ndarray]:
        """The results of requests that write a state, and the states in all slots."""
        rng = np.random.default_rng(0)
        states = self._states(rng)

        def step(states: PagedStates, *tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
            states, out = getattr(pallas_kernels, self.op)(states, *tokens, **chosen)
            slots = jnp.concatenate([states.read_blocks, states.write_blocks])
            return out, states.numbers.at[_ROW, slots].get(mode="fill", fill_value=0)

        out, slots = jax.device_get(jax.jit(step)(states, *self._tokens(rng)))
        numbers = slots.reshape(len(slots), -1)[:, : self.num_lines * self.line_size * _NUM_HEADS]
        return out[:-1], np.nan_to_num(numbers.astype(np.float32))

    def _tokens(self, rng: np.random.Generator) -> tuple[jax.Array, ...]:
        """The arguments of the op after the states."""
        # JAX would compile a program for each operation here.
        return jax.device_put(self._tokens_np(rng))

    def _tokens_np(self, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        def normal(*dims: int) -> np.ndarray:
            return rng.standard_normal((_NUM_REQS, *dims)).astype(np.float32)

        of_lines, of_columns = (_NUM_HEADS, self.num_lines), (_NUM_HEADS, self.line_size)
        log_decay = -np.abs(normal(*(of_lines if self.has_decay_per_row else of_lines[:1])))
        if self.op == "selective_step":
            rates = -np.exp(normal(*of_lines[1:], self.line_size)[:_NUM_HEADS])
            dt, b, c = np.abs(normal(*of_columns)), normal(*of_lines), normal(*of_lines)
            return normal(*of_columns), dt, rates, b, c
        if self.op == "ssd_step":  # all heads in one group
            b, c = normal(1, self.line_size), normal(1, self.line_size)
            return normal(*of_lines), b, c, log_decay
        k = normal(*of_lines)
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
        beta = 1 / (1 + np.exp(-normal(_NUM_HEADS)))
        return normal(*of_lines), k, normal(*of_columns), log_decay, beta

    def _states(self, rng: np.random.Generator) -> PagedStates:
        """Random states in random blocks.

        The first request writes the slot that it reads. The second one starts from zeros, and its
        slot holds NaN. The last one writes nothing.
        """
        num_pages = -(-self.num_lines * self.line_size * _NUM_HEADS // self.page_size)
        num_blocks = 2 * _NUM_REQS * num_pages
        read, write = rng.permutation(num_blocks).reshape(2, _NUM_REQS, num_pages)
        numbers_np = rng.standard_normal((_ROW + 1, num_blocks, self.page_size)).astype(np.float32)
        numbers_np[:, read[1]] = np.nan
        write[0], write[-1] = read[0], num_blocks
        pages_np = numbers_np.astype(jnp.dtype(self.dtype)).view(jnp.bfloat16)
        return jax.device_put(
            PagedStates(
                pages=pages_np,
                row=np.int32(_ROW),
                read_blocks=read.astype(np.int32),
                write_blocks=write.astype(np.int32),
                starts_from_zero=np.arange(_NUM_REQS) == 1,
                dtype=self.dtype,
            )
        )
