"""Drives a `LoadedModel` by hand, without scheduler or runner: chunks of tokens in, logits out."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from models.cache.format import Pages
from models.forward.forward_batch import ForwardBatch
from models.forward.wants import Wants
from models.loading.loaded_model import LoadedModel
from paxkv.runner.programs.make_batch import make_batch
from tests.oracles.placed_model import place_model
from tests.quick_compile import QUICK_COMPILE

NUM_TOKENS = 48  # of a step, so that one compiled program serves prompts, chunks and decodes
NUM_REQS = 4  # one row more than the tests use: it stays empty
MAX_MODEL_LEN = 48
BLOCK_SIZE = 8
LOGITS_ALONE = Wants()


class PagedStepper:
    """Three requests over one cache whose blocks are handed out in shuffled order.

    Every group of layers has block tables of its own. In those of sliding layers, blocks that no
    later token sees are replaced by the null block.

    Args:
        num_tokens: Tokens of every step, with padding.
        only_last_tokens: The logits of each chunk's last token are computed, and no others.
        widths: Numbers of tokens that a step may compute, the last `num_tokens`.
        cache_dtype: Of keys and values; None is that of the model.
        state_dtype: Of states and windows of convolutions; None is that of the model.
        wants: What the model returns in addition to logits.

    Attributes:
        reports: Of the last step, as in `Outputs.reports`.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_tokens: int = NUM_TOKENS,
        only_last_tokens: bool = False,
        widths: tuple[int, ...] = (),
        cache_dtype: str | None = None,
        state_dtype: str | None = None,
        wants: Wants = LOGITS_ALONE,
    ) -> None:
        self._placed = placed = place_model(
            loaded, block_size=BLOCK_SIZE, dtype=cache_dtype, state_dtype=state_dtype
        )
        self._loaded = placed.model
        self._table_shapes = placed.tables(MAX_MODEL_LEN)
        self._num_tokens = num_tokens
        self._only_last_tokens = only_last_tokens
        self._wants = dataclasses.replace(wants, logits="last" if only_last_tokens else "indices")
        self._widths = widths
        self.params = loaded.params
        # Of each group; without a window it is full attention.
        self._specs = [group.kv_cache_spec for group in placed.groups.kv_cache_groups]
        self._step = jax.jit(
            self._forward_and_logits, donate_argnums=(1,), compiler_options=QUICK_COMPILE
        )
        self.num_traces = 0
        self.reset()

    def reset(self) -> None:
        """Forgets all requests. Old memory becomes NaN, which shows if it is read."""
        # Block 0 is the null block, which no request owns.
        shapes = [
            (table.num_groups, NUM_REQS, table.max_blocks_per_req) for table in self._table_shapes
        ]
        sizes = [math.prod(shape) for shape in shapes]
        block_ids = 1 + np.random.RandomState(0).permutation(sum(sizes)).astype(np.int32)
        parts = np.split(block_ids, np.cumsum(sizes)[:-1])
        self._block_tables = [
            part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)
        ]
        self._seq_lens = np.zeros(NUM_REQS, np.int32)
        pages = jax.eval_shape(functools.partial(self._placed.empty_pages, 1 + sum(sizes)))
        # In 16-bit storage too, all bits set are NaN.
        is_float = jnp.issubdtype(pages.dtype, jnp.floating)
        fill = np.nan if is_float else jnp.iinfo(pages.dtype).max
        # `jnp.full` would compile a program for each shape.
        self._pages = jax.device_put(np.full(pages.shape, fill, pages.dtype))

    def step(self, chunks: dict[int, list[int]]) -> dict[int, np.ndarray]:
        """Runs one step.

        Args:
            chunks: Row -> the next tokens of its sequence; rows that are left out have no tokens.

        Returns:
            Row -> f32[len(chunk), vocab], the logits of each of its tokens, or f32[1, vocab].
        """
        counts = np.array([len(chunks.get(row, ())) for row in range(NUM_REQS)])
        query_start_loc = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        token_ids = np.zeros(self._num_tokens, np.int32)
        positions = np.zeros(self._num_tokens, np.int32)
        for row, chunk in chunks.items():
            own = slice(query_start_loc[row], query_start_loc[row + 1])
            token_ids[own] = chunk
            positions[own] = self._seq_lens[row] + np.arange(len(chunk))
            self._drop_blocks_out_of_window(row)
            self._seq_lens[row] += len(chunk)
        # Rows that run nothing in this step are shown as empty.
        seq_lens = np.where(counts > 0, self._seq_lens, 0).astype(np.int32)
        batch = make_batch(
            token_ids=token_ids,
            positions=positions,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_tables=[
                np.broadcast_to(tables, shape.dims(NUM_REQS)).copy()
                for tables, shape in zip(self._block_tables, self._table_shapes, strict=True)
            ],
            table_shapes=self._table_shapes,
            logits_indices=(
                np.maximum(query_start_loc[1:] - 1, 0)
                if self._only_last_tokens
                else np.arange(self._num_tokens, dtype=np.int32)
            ),
            wants=self._wants,
            widths=self._widths,
        )
        logits, self._pages, reports = self._step(self.params, self._pages, jax.device_put(batch))
        self.reports = jax.device_get(reports)
        logits_np = np.asarray(logits)
        if self._only_last_tokens:
            return {row: logits_np[row : row + 1] for row in sorted(chunks)}
        return {
            row: logits_np[query_start_loc[row] : query_start_loc[row + 1]]
            for row in sorted(chunks)
        }

    def _drop_blocks_out_of_window(self, row: int) -> None:
        # A group of states has slots, from which nothing is dropped.
        groups = (
            [None] * shape.num_kv_cache_groups if shape.is_state else tables
            for tables, shape in zip(self._block_tables, self._table_shapes, strict=True)
        )
        for group, spec in zip(itertools.chain.from_iterable(groups), self._specs, strict=True):
            if getattr(spec, "sliding_window", None) is not None:
                # The next token stands at seq_lens[row] and sees `window - 1` tokens before it.
                first_seen = max(0, self._seq_lens[row] - spec.sliding_window + 1)
                group[row, : first_seen // spec.block_size] = 0

    def _forward_and_logits(
        self, params: tuple[jax.Array, ...], pages: Pages, batch: ForwardBatch
    ) -> tuple[jax.Array, Pages, Mapping[str, jax.Array]]:
        self.num_traces += 1
        outputs, pages = self._loaded.forward(params, pages, batch)
        return self._loaded.compute_logits(params, outputs.for_logits), pages, outputs.reports
