"""`StepSampler`: starts the program that samples the tokens of steps, and owns its arrays."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from models import Pages
from paxkv.runner.memory.device_mesh import logits_sharding
from paxkv.runner.memory.zeros import put_zeros
from paxkv.runner.programs.warmup import StepPrograms
from paxkv.runner.sampling.row_state import allocate_row_state, row_fields, vocab_words
from paxkv.runner.shapes.step_buckets import StepBuckets


class StepSampler:
    """Owns the logits that a step leaves and the `RowState`, and samples the step's tokens.

    Attributes:
        logits: f32[num_rows, vocab]; the next step overwrites them.
        row_state: The next burst overwrites it.
        mask_dims: The dimensions of a `token_mask` (`process_logits`): num_rows, 1 + vocab_words.
    """

    def __init__(self, programs: StepPrograms, *, vocab_size: int, sharding: NamedSharding) -> None:
        buckets = programs.buckets
        num_rows = buckets.sampler_shape.num_rows
        self._programs = programs
        self._sampler_shape, self._row_shape = buckets.sampler_shape, buckets.row_shape
        self.logits = put_zeros(
            (num_rows, vocab_size), jnp.float32, logits_sharding(sharding.mesh, vocab_size)
        )
        self.mask_dims = (num_rows, 1 + vocab_words(vocab_size))
        self.row_state = allocate_row_state(buckets.row_shape, vocab_size, sharding)
        # The mask of steps without a grammar stays on the device, because most steps have none.
        self._no_mask = put_zeros(self.mask_dims, jnp.int32, sharding)

    @staticmethod
    def num_bytes(buckets: StepBuckets, vocab_size: int) -> int:
        """Returns the bytes of the arrays on the device. All numbers have 32 bits."""
        sampler_shape, row_shape = buckets.sampler_shape, buckets.row_shape
        widths = (vocab_size, 1 + vocab_words(vocab_size))
        fields = row_fields(row_shape.max_model_len, vocab_size).values()
        num_state_words = row_shape.num_rows * sum(math.prod(dims) for dims in fields)
        return 4 * (sampler_shape.num_rows * sum(widths) + num_state_words)

    def write_row(self, packed_np: np.ndarray, kv_cache: Pages) -> None:
        """Writes a row of `pack_row`."""
        program = self._programs.get(self._row_shape, kv_cache)
        self.row_state = program(self.row_state, packed_np)

    def draw(
        self,
        sampling: jax.Array,  # i32[num_rows, step_row_width], of the step that left the logits
        mask_np: np.ndarray | None,  # i32[mask_dims]
        kv_cache: Pages,
    ) -> tuple[jax.Array, jax.Array]:
        """Starts the sampler; returns its result and the next step's `prev_tokens`."""
        token_mask = self._no_mask if mask_np is None else mask_np
        program = self._programs.get(self._sampler_shape, kv_cache)
        self.logits, self.row_state, result, next_tokens = program(
            self.logits, self.row_state, sampling, token_mask
        )
        return result, next_tokens
