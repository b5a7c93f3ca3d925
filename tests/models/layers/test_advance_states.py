"""The states of rows without tokens are not computed if a program serves several widths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import CachePlace, ForwardBatch, KernelSettings, StateInputs, Wants
from models.cache.state_format import StateFormat
from models.forward.layer_context import LayerContext
from models.layers.advance_states import CHUNK_REQS, FEW_REQS, advance_states
from pallas_kernels.ragged_requests import request_of_token

NUM_ROWS = 2 * CHUNK_REQS + 4  # so that the last chunk has rows past the last one
FORMAT = StateFormat(shapes=((3, 2), (5,)), num_windows=1)
PAGE_WORDS = 8  # the window takes a page, and the state another


def make_context(num_used, widths: tuple[int, ...], tokens_each: int = 1) -> LayerContext:
    """One layer. Each row reads a slot of its own and writes another."""
    row_idx = jnp.arange(NUM_ROWS + 1, dtype=jnp.int32)
    starts = tokens_each * jnp.minimum(row_idx, num_used)
    token_idx = jnp.arange(tokens_each * NUM_ROWS, dtype=jnp.int32)
    slots = 1 + np.random.default_rng(0).permutation(4 * NUM_ROWS).reshape(2, 1, NUM_ROWS, 2)
    states = StateInputs(
        read_slots=jnp.asarray(slots[0], jnp.int32),
        write_slots=jnp.asarray(slots[1], jnp.int32),
        starts_from_zero=row_idx[:-1] % 3 == 1,
        is_alive=row_idx[:-1] % 5 != 3,
        query_start_loc=starts,
        has_one_token_each=tokens_each == 1,
        state_ends=None if tokens_each == 1 else starts[1:] - 1,
    )
    batch = ForwardBatch(
        token_ids=jnp.zeros_like(token_idx),
        positions=10 * token_idx,
        query_start_loc=starts,
        groups=(states,),
        logits_indices=row_idx[:-1],
        max_query_len=tokens_each,
        wants=Wants(logits="last"),
        widths=widths,
    )
    place = CachePlace(format=FORMAT, inputs_idx=0, group_idx=0, row=1)
    context = LayerContext(batch=batch, kernels=KernelSettings(), slots=(None,), cos_sin={})
    return context.at(0, (("own", place),))


def advance(arrays, states, state, context):
    """Each token sees the state of its request, which counts the tokens before `state_ends`."""
    (x,), (window, numbers) = arrays, states
    req = request_of_token(state.query_start_loc, x.shape[0])
    seen = (window.sum(axis=(1, 2)) + numbers.sum(axis=1))[req] + context.scan_positions
    ends = state.query_start_loc[1:] if state.state_ends is None else state.state_ends
    counts = (ends - state.query_start_loc[:-1])[:, None]
    return x * seen, (window + counts[..., None], 2 * numbers + counts)


@pytest.fixture(scope="module")
def advance_all():
    """The results and the pages after a step. Jitted for each value of `widths`."""

    def run(num_used, widths, tokens_each=1):
        rng = np.random.default_rng(1)
        # Blocks that no request has hold NaN, and so does the null block.
        pages = rng.standard_normal((2, 4 * NUM_ROWS + 2, PAGE_WORDS))
        pages[:, [0, -1]] = np.nan
        x = jnp.asarray(rng.standard_normal(tokens_each * NUM_ROWS), jnp.float32)
        context = make_context(num_used, widths, tokens_each)
        return advance_states(advance, "own", (x,), jnp.asarray(pages, jnp.float32), context)

    return jax.jit(run, static_argnums=(1, 2))


@pytest.mark.parametrize("num_used", [0, 1, CHUNK_REQS, 2 * CHUNK_REQS - 3, NUM_ROWS])
def test_chunks_give_the_results_and_pages_of_all_rows_at_once(advance_all, num_used):
    wanted, wanted_pages = advance_all(num_used, ())
    out, pages = advance_all(num_used, (CHUNK_REQS, NUM_ROWS))
    np.testing.assert_array_equal(out[:num_used], wanted[:num_used])
    np.testing.assert_array_equal(pages, wanted_pages)
    assert np.isfinite(out).all()


@pytest.mark.parametrize("num_used", [0, FEW_REQS, FEW_REQS + 1, NUM_ROWS])
def test_few_requests_of_several_tokens_have_the_results_of_all_rows(advance_all, num_used):
    wanted, wanted_pages = advance_all(num_used, (), 3)
    out, pages = advance_all(num_used, (FEW_REQS, 3 * NUM_ROWS), 3)
    np.testing.assert_array_equal(out[: 3 * num_used], wanted[: 3 * num_used])
    np.testing.assert_array_equal(pages, wanted_pages)


def test_rows_without_tokens_are_not_computed(advance_all):
    """The result of a chunk without tokens is zero, whatever its rows hold."""
    out, _ = advance_all(CHUNK_REQS - 1, (CHUNK_REQS, NUM_ROWS))
    assert np.all(out[CHUNK_REQS:] == 0)
    at_once, _ = advance_all(CHUNK_REQS - 1, ())
    assert np.all(at_once[CHUNK_REQS:] != 0)
