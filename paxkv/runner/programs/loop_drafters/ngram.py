"""N-gram drafts inside a loop on the device."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from models import Pages
from paxkv.runner.programs.loop_drafters.base import DraftedRows, LoopDrafter
from paxkv.runner.sampling.sampled_tokens import NO_TOKEN
from paxkv.runner.shapes.program_shapes import NgramShape


@dataclasses.dataclass(frozen=True, slots=True)
class NgramLoopDrafter(LoopDrafter):
    """Finds drafts in the tokens of the row."""

    shape: NgramShape

    @property
    def num_drafts(self) -> int:
        return self.shape.num_drafts

    def propose(self, drafted: DraftedRows, pages: Pages, memory: Any) -> tuple[jax.Array, Pages]:
        return find_ngram_drafts(drafted.token_ids, drafted.positions + 1, self.shape), pages


def find_ngram_drafts(
    token_ids: jax.Array,  # i32[num_rows, max_tokens]
    num_tokens: jax.Array,  # i32[num_rows], at least 1
    ngram: NgramShape,
) -> jax.Array:  # i32[num_rows, num_drafts], `NO_TOKEN` after the last draft
    """Finds the tokens after the first of the longest matches, as `drafters/ngram.py` does."""
    ends = jnp.arange(token_ids.shape[1], dtype=jnp.int32)  # of matches
    lengths = jnp.zeros(token_ids.shape, jnp.int32)
    is_equal = ends < num_tokens[:, None]
    for offset in range(1, ngram.longest + 1):
        place = num_tokens[:, None] - offset
        last = jnp.take_along_axis(token_ids, jnp.maximum(place, 0), axis=1)
        is_equal &= (jnp.roll(token_ids, offset, axis=1) == last) & (ends >= offset)
        lengths += is_equal
    longest = jnp.max(lengths, axis=1)
    # `argmax` returns the first.
    first = jnp.argmax(lengths == longest[:, None], axis=1).astype(jnp.int32)
    places = first[:, None] + jnp.arange(ngram.num_drafts, dtype=jnp.int32)
    found = jnp.take_along_axis(token_ids, places, axis=1, mode="clip")
    is_draft = (longest >= ngram.shortest)[:, None] & (places < num_tokens[:, None])
    return jnp.where(is_draft, found, NO_TOKEN)
