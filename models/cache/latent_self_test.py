"""`LatentSelfTest`: compares the kernels of latent attention with plain XLA, on the device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from models.cache.self_test import MAX_RELATIVE_ERROR, relative_error
from models.cache.self_test_batch import RaggedBatch, ragged_batch, run_layer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LatentSelfTest:
    """Latent attention of one layer over vectors as they are stored, and a block copy.

    Args:
        width: Of a stored vector.
    """

    scale: float
    num_q_heads: int
    latent_dim: int
    rope_dim: int
    width: int
    block_size: int
    dtype: str

    def why_kernels_differ(
        self, target: pallas_kernels.Target, *, implementation: str | None = None
    ) -> str | None:
        """See `SelfTest.why_kernels_differ`."""
        expected = self._run({"implementation": "xla", "target": target})
        got = self._run({"implementation": implementation, "target": target})
        if not np.array_equal(got[1], expected[1]):
            return "latents were not written where XLA writes them"
        for what, only_decodes in (("a batch of any requests", 0), ("decodes alone", 2)):
            difference = relative_error(got[only_decodes], expected[only_decodes])
            if not difference <= MAX_RELATIVE_ERROR:  # NaN is not
                return (
                    f"latent attention of {what} differs from XLA's by {difference:.3g} of its "
                    f"norm, more than {MAX_RELATIVE_ERROR}"
                )
        return None

    def _run(self, chosen: dict[str, object]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Attention's output; the cache at the end; and the output of the decodes alone."""
        rng = np.random.default_rng(0)
        batch = ragged_batch(rng, self.block_size)

        def normal(*shape: int) -> jax.Array:
            return jnp.asarray(rng.standard_normal(shape, np.float32), self.dtype)

        # Products have a spread of 1 after scaling. If it was larger, each token would see little
        # more than a single key.
        spread = self.scale * (self.latent_dim + self.rope_dim) ** 0.5
        heads = (batch.num_tokens, self.num_q_heads)
        queries = tuple(normal(*heads, dim) / spread for dim in (self.latent_dim, self.rope_dim))
        kv_cache = normal(1, batch.num_blocks, 1, self.block_size, self.width)
        new = normal(batch.num_tokens, 1, self.width)

        def layer(
            queries: tuple[jax.Array, jax.Array],
            kv_cache: jax.Array,
            new: jax.Array,
            batch: RaggedBatch,
        ) -> tuple[jax.Array, ...]:
            def attend(
                kv_cache: jax.Array, sequences: tuple[jax.Array, ...], *, num: int | None = None
            ) -> jax.Array:
                return pallas_kernels.latent_attention(
                    *(*(q[:num] for q in queries), kv_cache, 0, *sequences),
                    scale=self.scale,
                    max_query_len=num and 1,
                    **chosen,
                )

            out, cache = run_layer(attend, kv_cache, (new, None), batch, chosen)
            # The first two requests decode.
            tables, lens = batch.block_tables[:2], batch.seq_lens[:2]
            decodes = (tables, lens, batch.query_start_loc[:3])
            return out, cache, attend(cache, decodes, num=2)

        results = jax.device_get(jax.jit(layer)(queries, kv_cache, new, batch))
        return tuple(np.asarray(array, np.float32) for array in results)
