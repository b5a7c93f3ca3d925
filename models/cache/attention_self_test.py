"""`AttentionSelfTest`: compares the kernels of attention with plain XLA, on the device itself."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from models.cache.self_test import MAX_RELATIVE_ERROR, AttentionRules, relative_error
from models.cache.self_test_batch import RaggedBatch, ragged_batch, run_layer

# A window of 4,096 tokens, or a soft cap of 50, would change nothing in inputs as small as these.
# Larger limits are replaced by these, so a kernel that forgets a limit fails.
MAX_WINDOW = 60
MAX_SOFT_CAP = 1.0
# The mean of random sinks: a sink weighs as much as 50 keys.
MEAN_SINK = 4.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSelfTest:
    """Attention of one layer over keys and values as they are stored, and a block copy.

    Layers that differ only in their rotary embeddings have equal tests.

    Args:
        head_dim: Width of a stored key or value.
    """

    scale: float
    sliding_window: int | None
    chunk_size: int | None
    soft_cap: float | None
    has_sinks: bool
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str

    @classmethod
    def of_layer(
        cls,
        attention: AttentionRules,
        *,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: str,
    ) -> "AttentionSelfTest":
        """The test of one layer, with limits that small inputs reach."""
        return cls(
            scale=attention.scale,
            sliding_window=_at_most(attention.sliding_window, MAX_WINDOW),
            chunk_size=_at_most(attention.chunk_size, MAX_WINDOW),
            soft_cap=_at_most(attention.soft_cap, MAX_SOFT_CAP),
            has_sinks=attention.has_sinks,
            num_q_heads=attention.num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            dtype=dtype,
        )

    def why_kernels_differ(
        self, target: pallas_kernels.Target, *, implementation: str | None = None
    ) -> str | None:
        """See `SelfTest.why_kernels_differ`."""
        inputs = self._random_inputs()
        expected = self._run(inputs, {"implementation": "xla", "target": target})
        got = self._run(inputs, {"implementation": implementation, "target": target})
        for part, name in enumerate(("K", "V")):
            if not np.array_equal(got[1][:, part::2], expected[1][:, part::2]):
                return f"{name} was not written where XLA writes it"
        difference = relative_error(got[0], expected[0])
        if not difference <= MAX_RELATIVE_ERROR:  # NaN is not
            sinks = ", sinks" if self.has_sinks else ""
            return (
                f"attention with {self.rules}{sinks} differs from XLA's by {difference:.3g} of its "
                f"norm, more than {MAX_RELATIVE_ERROR}"
            )
        return None

    @property
    def rules(self) -> dict[str, float | None]:
        """Static arguments of `paged_attention`."""
        return {
            "scale": self.scale,
            "sliding_window": self.sliding_window,
            "chunk_size": self.chunk_size,
            "soft_cap": self.soft_cap,
        }

    def _random_inputs(self) -> dict[str, jax.Array | None]:
        """A cache of one row full of random numbers, and a ragged batch over it."""
        rng = np.random.default_rng(self.sliding_window or 0)
        batch = ragged_batch(rng, self.block_size)
        num_tokens = batch.num_tokens

        # A Python float would widen arrays of bfloat16 in NumPy.
        number = jnp.dtype(self.dtype).type

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape, np.float32).astype(number)

        # JAX would compile a program for each operation here.
        inputs = {
            "kv_cache": normal(
                1, 2 * batch.num_blocks, self.num_kv_heads, self.block_size, self.head_dim
            ),
            # Products have a spread of 1 after scaling. If it was larger, each token would see
            # little more than a single key.
            "q": normal(num_tokens, self.num_q_heads, self.head_dim)
            / number(self.scale * self.head_dim**0.5),
            "k": normal(num_tokens, self.num_kv_heads, self.head_dim),
            "v": normal(num_tokens, self.num_kv_heads, self.head_dim),
            **batch._asdict(),
            "sinks": number(MEAN_SINK) + normal(self.num_q_heads) if self.has_sinks else None,
        }
        return jax.device_put(inputs)

    def _run(
        self, inputs: dict[str, jax.Array | None], chosen: dict[str, object]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Attention's output, and the cache after one layer and a block copy, as float32."""

        def layer(inputs: dict[str, jax.Array | None]) -> tuple[jax.Array, jax.Array]:
            def attend(kv_cache: jax.Array, sequences: tuple[jax.Array, ...]) -> jax.Array:
                return pallas_kernels.paged_attention(
                    *(inputs["q"], kv_cache, 0, *sequences),
                    sinks=inputs["sinks"],
                    **self.rules,
                    **chosen,
                )

            batch = RaggedBatch(*(inputs[name] for name in RaggedBatch._fields))
            new = (inputs["k"], inputs["v"])
            return run_layer(attend, inputs["kv_cache"], new, batch, chosen)

        results = jax.device_get(jax.jit(layer)(inputs))
        return tuple(np.asarray(array, np.float32) for array in results)


def _at_most(limit: float | None, largest: float) -> float | None:
    return None if limit is None else min(limit, largest)
