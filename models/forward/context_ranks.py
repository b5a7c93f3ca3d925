"""Context parallelism: the devices of a group share the positions of each request.

Device d is rank `d % num_ranks` of its group. Position p is on rank `p % num_ranks`, as number
`p // num_ranks` of that rank. All devices of a group have the same KV head or the same latents.

Example with 2 ranks and blocks of 4 tokens on each. A block of the pool then has 8 positions:
    position  0  1  2  3  4  5  6  7
    rank      0  1  0  1  0  1  0  1
    offset    0  0  1  1  2  2  3  3
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from models.weight_rule import MODEL_AXIS


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextRanks:
    """The groups of ranks in a mesh. All methods run in `KernelSettings.by_device`.

    Args:
        num_ranks: Of each group; it divides `num_devices`. 1 means no context parallelism.
        num_devices: Of the mesh.
    """

    num_ranks: int
    num_devices: int

    def own_slots(
        self,
        slots: jax.Array,  # i32[num_tokens], on the rank that has the token
        positions: jax.Array,  # i32[num_tokens]
        pad_slot: int,
    ) -> jax.Array:  # i32[num_tokens]
        """The slots of the rank's own tokens, and `pad_slot` for all others."""
        if self.num_ranks == 1:
            return slots
        return jnp.where(positions % self.num_ranks == self._rank(), slots, pad_slot)

    def attend(
        self,
        function: Callable[..., jax.Array | tuple[jax.Array, jax.Array]],
        queries: tuple[jax.Array, ...],  # f[num_tokens, num_q_heads, head_dim] each
        seq_lens: jax.Array,  # i32[num_reqs]
        query_start_loc: jax.Array,  # i32[num_reqs + 1]
        *,
        max_query_len: int | None,
    ) -> jax.Array:  # f[num_tokens, num_q_heads, value_dim]
        """Attends with the device's own query heads to the keys of all ranks.

        Each rank attends with the heads of the whole group to its own keys. Each device then gets
        the results of its own heads from all ranks, and merges them.

        Args:
            function: An attention op that takes the queries and `seq_lens`. With more than one
                rank, it also gets `return_lse=True`, and `key_limits` unless `max_query_len` is 1.
        """
        if self.num_ranks == 1:
            return function(*queries, seq_lens)
        # One collective for all arrays, because they would wait for each other.
        joined = jnp.concatenate(queries, axis=-1)
        joined = self._on_group(jax.lax.all_gather, joined, axis=1, tiled=True)
        ends = np.cumsum([q.shape[-1] for q in queries])[:-1]
        of_group = jnp.split(joined, ends, axis=-1)
        limits = {}
        if max_query_len != 1:  # otherwise, a request's only token sees all its keys
            seen = _num_seen(seq_lens, query_start_loc, queries[0].shape[0])
            limits["key_limits"] = self._num_own(seen)
        out, lse = function(*of_group, self._num_own(seq_lens), return_lse=True, **limits)
        outs, lses = self._of_own_heads(out, lse)
        merged, _ = functools.reduce(
            lambda one, other: pallas_kernels.merge_attention_states(*one, *other),
            zip(outs.astype(jnp.float32), lses, strict=True),
        )
        return merged.astype(out.dtype)

    def _of_own_heads(
        self,
        out: jax.Array,  # f[num_tokens, num_ranks * num_q_heads, value_dim]
        lse: jax.Array,  # f32[num_tokens, num_ranks * num_q_heads]
    ) -> tuple[jax.Array, jax.Array]:
        """The results of the device's own heads, from each rank.

        Returns:
            `f[num_ranks, num_tokens, num_q_heads, value_dim]` and
            `f32[num_ranks, num_tokens, num_q_heads]`.
        """
        # Both are exchanged together, so they need one dtype. Integers of their bits are exchanged,
        # because XLA may convert 16-bit floats for an exchange.
        bits = jnp.dtype(f"uint{8 * out.dtype.itemsize}")
        num_tokens, num_heads, width = out.shape
        out_bits = jax.lax.bitcast_convert_type(out, bits)
        lse_bits = jax.lax.bitcast_convert_type(lse, bits).reshape(num_tokens, num_heads, -1)
        results = jnp.concatenate([out_bits, lse_bits], axis=-1)
        by_rank = results.reshape(num_tokens, self.num_ranks, num_heads // self.num_ranks, -1)
        parts = self._on_group(jax.lax.all_to_all, by_rank, split_axis=1, concat_axis=0)
        lses = parts[..., width:] if bits.itemsize < 4 else parts[..., width]
        return (
            jax.lax.bitcast_convert_type(parts[..., :width], out.dtype),
            jax.lax.bitcast_convert_type(lses, jnp.float32),
        )

    def _num_own(self, num_tokens: jax.Array) -> jax.Array:
        """How many of the first `num_tokens` tokens of a request the rank has."""
        return (num_tokens + self.num_ranks - 1 - self._rank()) // self.num_ranks

    def _rank(self) -> jax.Array:  # i32[]
        return jax.lax.axis_index(MODEL_AXIS) % self.num_ranks

    def _on_group(
        self, collective: Callable[..., jax.Array], x: jax.Array, **axes: int
    ) -> jax.Array:
        """Calls a collective operation, with results among the devices of each group."""
        starts = range(0, self.num_devices, self.num_ranks)
        groups = [list(range(start, start + self.num_ranks)) for start in starts]
        return collective(x, MODEL_AXIS, axis_index_groups=groups, **axes)


def _num_seen(
    seq_lens: jax.Array,  # i32[num_reqs]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    num_tokens: int,
) -> jax.Array:  # i32[num_tokens]
    """How many tokens of its request each token sees, itself included; anything for padding."""
    token_idx = jnp.arange(num_tokens, dtype=jnp.int32)
    ends = query_start_loc[1:]
    req_idx = jnp.searchsorted(ends, token_idx, side="right", method="compare_all")
    req_idx = jnp.minimum(req_idx, seq_lens.shape[0] - 1)
    return jnp.maximum(seq_lens[req_idx] - (ends[req_idx] - 1 - token_idx), 0)
