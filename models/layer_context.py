"""`LayerContext`: what a layer may ask of the step that it is part of."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import jax
import jax.numpy as jnp

from models.forward_batch import ForwardBatch
from models.kernel_settings import KernelSettings
from models.rope_config import RopeConfig
from models.row_widths import Width

Rows = TypeVar("Rows")


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlace:
    """Where a layer finds its block tables and its memory.

    In a loop over layers both are i32[], those of the layer that the loop is at.
    """

    group_idx: int | jax.Array  # in [0, num_groups)
    row: int | jax.Array  # in [0, num_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContext:
    """The step as one layer sees it; all but `place` and `drops_rows` is shared by all layers."""

    batch: ForwardBatch
    kernels: KernelSettings
    slots: jax.Array  # i32[num_groups, num_tokens], where each token's key and value are written
    # For each `AttentionConfig.rotary`: cosine and sine, f32[num_tokens, rotary_dim // 2].
    cos_sin: Mapping[tuple[RopeConfig, int], tuple[jax.Array, jax.Array]]
    place: CachePlace | None = None
    # Whether only the last token of each request goes on from here, and attends; the others leave
    # what they write into the cache.
    drops_rows: bool = False

    def at(self, place: CachePlace) -> "LayerContext":
        """Of a layer with its cache there."""
        return replace(self, place=place)

    def of_last_layer(self) -> "LayerContext":
        """Of the last layer, which drops the rows that no output needs (`drops_rows`)."""
        return replace(self, drops_rows=self.batch.drops_rows)

    def kept(self, x: jax.Array) -> jax.Array:  # f[num_tokens, ...] -> f[num_queries, ...]
        """The rows of the tokens that go on from this layer."""
        return x[self.batch.last_tokens] if self.drops_rows else x

    def by_token(self, function: Callable[..., Rows], *rows: jax.Array) -> Rows:
        """`function(*rows)`, of work in which each token has its own rows and sees no other's.

        Rows after the step's tokens may be left out of the work: their results are then zero.

        Args:
            function: Takes and returns arrays, or tuples of them, with tokens as the first axis.
            rows: Arrays with one row for each token of the step, or for each row of `kept`.
        """
        num_tokens, widths = self.batch.token_ids.shape[0], self.batch.widths
        if len(widths) < 2 or rows[0].shape[0] != num_tokens:
            return function(*rows)
        shapes = jax.eval_shape(function, *rows)
        room = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)

        def run(width: Width, room: Rows) -> Rows:
            return jax.tree.map(width.write, room, function(*map(width.read, rows)))

        return self.batch.at_width(run, room)

    @property
    def num_queries_per_req(self) -> int | None:
        """No request has more tokens that attend; None promises nothing."""
        return 1 if self.drops_rows else self.batch.max_query_len

    @property
    def query_start_loc(self) -> jax.Array:  # i32[num_reqs + 1]
        """`ForwardBatch.query_start_loc` of the tokens that attend."""
        starts = self.batch.query_start_loc
        if not self.drops_rows:
            return starts
        num_used = (starts[1:] > starts[:-1]).sum(dtype=jnp.int32)
        return jnp.minimum(jnp.arange(starts.shape[0], dtype=jnp.int32), num_used)
