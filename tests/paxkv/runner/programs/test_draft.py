"""The tokens that a draft head reads after a step."""

import jax
import jax.numpy as jnp

from paxkv.runner.programs.draft import _find_next_tokens
from paxkv.runner.sampling.sampled_tokens import NO_TOKEN


def test_head_reads_drawn_tokens_up_to_the_first_rejected_draft():
    """A request with 2 drafts, of which 1 is right; a part of a prompt; a whole prompt; no request.

    Tokens: 5 with the drafts 7, 8; the prompt's tokens 1, 2; the prompt's tokens 3, 4; padding.
    """
    fields = {
        "token_ids": jnp.array([5, 7, 8, 1, 2, 3, 4, 0]),
        "query_start_loc": jnp.array([0, 3, 5, 7, 7]),
        "logits_indices": jnp.array([0, 1, 2, 4, 6, 0]),
        "draw_position": jnp.array([9, 10, 11, 0, 2, 0]),
        "draw_req": jnp.array([0, 0, 0, 1, 2, 0]),
        "draw_idx": jnp.array([0, 1, 2, 0, 0, 0]),
    }
    drawn_ids = jnp.array(
        [[7, NO_TOKEN, 6, NO_TOKEN], [9, NO_TOKEN, NO_TOKEN, NO_TOKEN], [NO_TOKEN] * 4]
    )
    found = jax.jit(_find_next_tokens)(fields, drawn_ids, jnp.array([0, 33, 0, 0]))
    next_ids = found.next_ids.tolist()
    assert next_ids[:2] == [7, 9] and next_ids[3:7] == [2, 33, 4, 6]
    assert found.last_idx.tolist()[:3] == [1, 4, 6]
    assert found.has_drawn.tolist() == [True, False, True, False]
