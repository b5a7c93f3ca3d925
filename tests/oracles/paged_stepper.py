"""Drives a `LoadedModel` by hand, without scheduler or runner: chunks of tokens in, logits out."""

import jax
import jax.numpy as jnp
import numpy as np

from models.forward_batch import ForwardBatch, KVCache
from models.loading.loaded_model import LoadedModel

NUM_TOKENS = 48  # of every step, so that one compiled program serves prompts, chunks and decodes
NUM_REQS = 4  # one row more than the tests use: it stays empty
MAX_BLOCKS_PER_REQ = 6
BLOCK_SIZE = 8


class PagedStepper:
    """Three requests over one cache whose blocks are handed out in shuffled order."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self.params = loaded.params
        self._step = jax.jit(self._forward_and_logits, donate_argnums=(1,))
        self.num_traces = 0
        self.reset()

    def reset(self) -> None:
        """Forgets all requests. Old memory is NaN: whoever reads it shows it."""
        config = self._loaded.config
        # Block 0 is the null block, which nobody owns.
        block_ids = 1 + np.random.RandomState(0).permutation(NUM_REQS * MAX_BLOCKS_PER_REQ)
        self._block_tables = block_ids.reshape(1, NUM_REQS, MAX_BLOCKS_PER_REQ).astype(np.int32)
        self._seq_lens = np.zeros((1, NUM_REQS), np.int32)
        shape = (
            config.num_layers,
            block_ids.size + 1,
            config.num_kv_heads,
            BLOCK_SIZE,
            config.head_dim,
        )
        dtype = self.params[0].dtype
        self._kv_cache = KVCache(k=jnp.full(shape, np.nan, dtype), v=jnp.full(shape, np.nan, dtype))

    def step(self, chunks: dict[int, list[int]]) -> dict[int, np.ndarray]:
        """Runs one step.

        Args:
            chunks: Row -> the next tokens of its sequence; rows that are left out have no tokens.

        Returns:
            Row -> f32[len(chunk), vocab], the logits of each of its tokens.
        """
        counts = np.array([len(chunks.get(row, ())) for row in range(NUM_REQS)])
        query_start_loc = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        token_ids = np.zeros(NUM_TOKENS, np.int32)
        positions = np.zeros(NUM_TOKENS, np.int32)
        for row, chunk in chunks.items():
            own = slice(query_start_loc[row], query_start_loc[row + 1])
            token_ids[own] = chunk
            positions[own] = self._seq_lens[0, row] + np.arange(len(chunk))
            self._seq_lens[0, row] += len(chunk)
        # Rows that run nothing in this step are shown as empty.
        seq_lens = np.where(counts > 0, self._seq_lens, 0).astype(np.int32)
        batch = ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_tables=self._block_tables,
            logits_indices=np.arange(NUM_TOKENS, dtype=np.int32),
        )
        logits, self._kv_cache = self._step(self.params, self._kv_cache, jax.device_put(batch))
        logits_np = np.asarray(logits)
        return {
            row: logits_np[query_start_loc[row] : query_start_loc[row + 1]]
            for row in sorted(chunks)
        }

    def _forward_and_logits(
        self, params: tuple[jax.Array, ...], kv_cache: KVCache, batch: ForwardBatch
    ) -> tuple[jax.Array, KVCache]:
        self.num_traces += 1
        hidden, kv_cache = self._loaded.forward(params, kv_cache, batch)
        logits = self._loaded.compute_logits(params, hidden[batch.logits_indices])
        return logits, kv_cache
