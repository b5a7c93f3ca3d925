"""A layer finds its own caches in a step, by their names."""

import jax.numpy as jnp
import pytest

from models import (
    AttentionFormat,
    CachePlace,
    ForwardBatch,
    GroupInputs,
    KernelSettings,
    ModelError,
)
from models.layer_context import LayerContext, make_context

MAIN = AttentionFormat(num_kv_heads=2, head_dim=8, dtype="float32")
INDEX = AttentionFormat(num_kv_heads=1, head_dim=8, dtype="float32")
NUM_ROWS, NUM_BLOCKS = 2, 20


@pytest.fixture
def context() -> LayerContext:
    """Two requests, with tokens 9 to 11 and 3, in two groups of blocks of 4, and one of 8."""
    seq_lens = jnp.asarray([12, 4], jnp.int32)
    short = [[[1, 2, 3], [4, 0, 0]], [[5, 6, 7], [8, 0, 0]]]
    long = [[[9, 10], [11, 0]]]
    batch = ForwardBatch(
        token_ids=jnp.zeros(5, jnp.int32),
        positions=jnp.asarray([9, 10, 11, 3, 0], jnp.int32),
        query_start_loc=jnp.asarray([0, 3, 4], jnp.int32),
        groups=tuple(
            GroupInputs(
                block_tables=jnp.asarray(tables, jnp.int32),
                seq_lens=seq_lens,
                block_size=block_size,
            )
            for tables, block_size in ((short, 4), (long, 8))
        ),
        logits_indices=jnp.asarray([2, 3], jnp.int32),
    )
    pages = jnp.zeros((NUM_ROWS, NUM_BLOCKS, 2 * 2 * 8 * 4))
    return make_context(batch, pages, KernelSettings(), [])


def test_a_layer_finds_each_of_its_caches(context):
    layer = context.at(
        (
            ("self_attn", CachePlace(format=MAIN, inputs_idx=0, group_idx=1, row=1)),
            ("index", CachePlace(format=INDEX, inputs_idx=1, group_idx=0, row=0)),
        )
    )
    main, index = layer.cache("self_attn"), layer.cache("index")
    assert (main.format, main.row, main.block_size) == (MAIN, 1, 4)
    assert (index.format, index.row, index.block_size) == (INDEX, 0, 8)
    assert main.block_tables.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert index.block_tables.tolist() == [[9, 10], [11, 0]]
    assert main.seq_lens.tolist() == index.seq_lens.tolist() == [12, 4]
    # Position 9 is in the third block of 4 tokens, and in the second of 8. Padding goes past the
    # end of all rows.
    assert main.slots.tolist() == [7 * 4 + 1, 7 * 4 + 2, 7 * 4 + 3, 8 * 4 + 3, 2 * 20 * 4]
    assert index.slots.tolist() == [10 * 8 + 1, 10 * 8 + 2, 10 * 8 + 3, 11 * 8 + 3, 2 * 20 * 8]


def test_a_cache_that_a_layer_has_not_is_refused_with_those_that_it_has(context):
    place = CachePlace(format=MAIN, inputs_idx=0, group_idx=0, row=0)
    layer = context.at((("self_attn", place), ("index", place)))
    message = r"its cache 'state' and has \['self_attn', 'index'\]. .* `DecoderSpec` must list"
    with pytest.raises(ModelError, match=message):
        layer.cache("state")
    # All layers share the step, but no places.
    with pytest.raises(ModelError, match=r"its cache 'self_attn' and has \[\]"):
        context.cache("self_attn")
