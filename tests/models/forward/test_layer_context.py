"""What a layer asks of its context: its caches by name, and rows of the tokens at hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from models import (
    AttentionFormat,
    CachePlace,
    ForwardBatch,
    GroupInputs,
    KernelSettings,
    ModelError,
    StateInputs,
    Wants,
)
from models.config.rope_config import RopeConfig
from models.forward.layer_context import LayerContext, make_context
from tests import on_device
from tests.models.plain_context import plain_context

MAIN = AttentionFormat(num_kv_heads=2, head_dim=8, dtype="float32")
INDEX = AttentionFormat(num_kv_heads=1, head_dim=8, dtype="float32")
NUM_ROWS, NUM_BLOCKS = 2, 20
PAD = pallas_kernels.pad_slot(NUM_ROWS, NUM_BLOCKS, 4)


def context_of(batch: ForwardBatch) -> LayerContext:
    """The result of `make_context` without rotary embeddings. One program computes the slots."""
    pages = jax.ShapeDtypeStruct((NUM_ROWS, NUM_BLOCKS, 2 * 2 * 8 * 4), jnp.float32)
    kernels = KernelSettings()
    slots = jax.jit(lambda batch: make_context(batch, pages, kernels, []).slots)(batch)
    return LayerContext(batch=batch, kernels=kernels, slots=slots, cos_sin={})


@pytest.fixture
def context() -> LayerContext:
    """Two requests, with tokens 9 to 11 and 3, in two groups of blocks of 4, and one of 8."""
    seq_lens = on_device.array([12, 4], jnp.int32)
    short = [[[1, 2, 3], [4, 0, 0]], [[5, 6, 7], [8, 0, 0]]]
    long = [[[9, 10], [11, 0]]]
    batch = ForwardBatch(
        token_ids=on_device.zeros(5, jnp.int32),
        positions=on_device.array([9, 10, 11, 3, 0], jnp.int32),
        query_start_loc=on_device.array([0, 3, 4], jnp.int32),
        groups=tuple(
            GroupInputs(
                block_tables=on_device.array(tables, jnp.int32),
                seq_lens=seq_lens,
                block_size=block_size,
            )
            for tables, block_size in ((short, 4), (long, 8))
        ),
        logits_indices=on_device.array([2, 3], jnp.int32),
    )
    return context_of(batch)


@pytest.mark.parametrize("has_one_token_each", [False, True])
def test_rows_that_are_not_alive_write_no_keys_and_values(has_one_token_each):
    """Their states have changed since their tokens were first computed."""
    slot_blocks = on_device.zeros((1, 3, 1), jnp.int32)
    states = StateInputs(
        read_slots=slot_blocks,
        write_slots=slot_blocks,
        starts_from_zero=on_device.zeros(3, bool),
        is_alive=on_device.array([True, False, True]),
        query_start_loc=on_device.array([0, 1, 2, 3] if has_one_token_each else [0, 2, 3, 4]),
        has_one_token_each=has_one_token_each,
    )
    num_tokens = 3 if has_one_token_each else 5
    tables = on_device.array([[[1, 0], [2, 0], [3, 0]]], jnp.int32)
    batch = ForwardBatch(
        token_ids=on_device.zeros(num_tokens, jnp.int32),
        positions=on_device.zeros(num_tokens, jnp.int32),
        query_start_loc=states.query_start_loc.astype(jnp.int32),
        groups=(GroupInputs(block_tables=tables, seq_lens=on_device.ones(3), block_size=4), states),
        logits_indices=on_device.zeros(3, jnp.int32),
    )
    expected = [4, PAD, 12] if has_one_token_each else [4, 4, PAD, 12, PAD]
    np.testing.assert_array_equal(context_of(batch).slots[0][0], expected)


def test_a_layer_finds_each_of_its_caches(context):
    layer = context.at(
        0,
        (
            ("self_attn", CachePlace(format=MAIN, inputs_idx=0, group_idx=1, row=1)),
            ("index", CachePlace(format=INDEX, inputs_idx=1, group_idx=0, row=0)),
        ),
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


def test_an_unknown_cache_is_refused_with_the_names_of_the_layers_caches(context):
    place = CachePlace(format=MAIN, inputs_idx=0, group_idx=0, row=0)
    layer = context.at(0, (("self_attn", place), ("index", place)))
    message = r"its cache 'state' and has \['self_attn', 'index'\]. .* `DecoderSpec` must list"
    with pytest.raises(ModelError, match=message):
        layer.cache("state")
    # All layers share the step, but no places.
    with pytest.raises(ModelError, match=r"its cache 'self_attn' and has \[\]"):
        context.cache("self_attn")


def changed_batch(context: LayerContext, **fields: object) -> LayerContext:
    return dataclasses.replace(context, batch=dataclasses.replace(context.batch, **fields))


def test_of_rows_returns_the_rows_of_the_contexts_tokens(context):
    values = on_device.array([10, 11, 12, 13, 14])
    assert context.of_rows(values) is values
    # The first layers keep all tokens, and the last one goes on with one token of each request.
    assert context.of_kept() is context
    last = changed_batch(context, wants=Wants(logits="last")).of_last_layer()
    assert last.of_rows(values) is values
    assert last.of_kept().of_rows(values).tolist() == last.kept(values).tolist() == [12, 13]


def test_by_token_computes_the_rows_in_use_with_their_context(context):
    values = on_device.array([10, 11, 12, 13, 14])
    others = on_device.array([1, 2, 3, 4, 5])
    widths = []

    def add(own: jax.Array, given: LayerContext) -> jax.Array:
        widths.append(own.shape[0])
        # A part of a part has the same rows.
        return given.by_token(lambda own, given: own + given.of_rows(others), own)

    assert context.by_token(add, values).tolist() == [11, 13, 15, 17, 19]
    assert widths == [5]
    # Four of the five tokens are in use, so the fifth is left out.
    narrow = changed_batch(context, widths=(2, 4, 5), wants=Wants(logits="last"))
    assert narrow.by_token(add, values).tolist() == [11, 13, 15, 17, 0]
    assert {2, 4} < set(widths)
    # Rows that were kept are few: they are computed as they are.
    kept = narrow.of_last_layer()
    widths.clear()
    assert kept.of_kept().by_token(add, kept.kept(values)).tolist() == [15, 17]
    assert widths == [2]


def test_rows_of_another_number_are_refused(context):
    values = on_device.array([10, 11, 12, 13, 14])
    last = changed_batch(context, widths=(2, 4, 5), wants=Wants(logits="last")).of_last_layer()
    with pytest.raises(ModelError, match=r"of shape \(2,\), and its context is of 5 rows"):
        last.by_token(lambda own, given: own, last.kept(values))
    with pytest.raises(ModelError, match=r"of shape \(5,\), and its context is of 2 rows"):
        last.of_kept().by_token(lambda own, given: own, values)


def test_rows_are_dropped_once_and_of_all_tokens(context):
    values = on_device.array([10, 11, 12, 13, 14])
    last = changed_batch(context, widths=(2, 4, 5), wants=Wants(logits="last")).of_last_layer()
    with pytest.raises(ModelError, match=r"context is of 2 of 5 rows.*`by_token`, and once"):
        last.of_kept().kept(last.kept(values))
    with pytest.raises(ModelError, match=r"context is of 2 of 5 rows"):
        last.by_token(lambda own, given: given.of_kept().of_rows(values), values)


def test_the_last_layer_has_one_query_for_each_request_with_tokens(context):
    starts = on_device.array([0, 3, 4, 4], jnp.int32)  # The third row has no request.
    context = changed_batch(context, query_start_loc=starts, wants=Wants(logits="last"))
    assert context.query_start_loc.tolist() == [0, 3, 4, 4]
    assert context.num_queries_per_req is None
    last = context.of_last_layer()
    assert last.query_start_loc.tolist() == [0, 1, 2, 2]
    assert last.num_queries_per_req == 1


def _interleaved_axes(sections):
    """Of each pair, as transformers interleaves them: axes 1 and 2 while they have pairs left."""
    axes = np.zeros(sum(sections), np.int32)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes.tolist()


@pytest.mark.parametrize("module_name", ["qwen2_5_vl", "qwen3_vl"])
def test_positions_on_three_axes_turn_tokens_as_in_transformers(module_name):
    torch = pytest.importorskip("torch")
    package = pytest.importorskip(f"transformers.models.{module_name}")
    module = getattr(package, f"modeling_{module_name}")
    sections, theta, head_dim = [4, 6, 6], 10_000.0, 32
    rope_parameters = {"rope_type": "default", "rope_theta": theta, "mrope_section": sections}
    fields = {"hidden_size": 64, "num_attention_heads": 2, "rope_parameters": rope_parameters}
    if module_name == "qwen3_vl":
        config = package.configuration_qwen3_vl.Qwen3VLTextConfig(**fields, head_dim=head_dim)
        rotary, axes = module.Qwen3VLTextRotaryEmbedding(config), _interleaved_axes(sections)
    else:
        config = package.configuration_qwen2_5_vl.Qwen2_5_VLTextConfig(**fields)
        rotary = module.Qwen2_5_VLRotaryEmbedding(config)
        axes = np.repeat([0, 1, 2], sections).tolist()
    positions_np = np.random.default_rng(0).integers(0, 900, (3, 5))
    wanted = rotary(torch.zeros(1), torch.from_numpy(positions_np)[:, None])
    rope = RopeConfig(theta=theta)
    context = dataclasses.replace(plain_context(5), cos_sin={(rope, head_dim): ()})
    got = context.with_rotary_positions(on_device.array(positions_np), axes).cos_sin[rope, head_dim]
    for got_part, wanted_part in zip(got, wanted, strict=True):
        np.testing.assert_allclose(
            got_part, wanted_part[0, :, : head_dim // 2].numpy(), atol=2e-4, rtol=0
        )


def test_positions_for_another_number_of_pairs_are_refused():
    context = dataclasses.replace(plain_context(2), cos_sin={(RopeConfig(), 8): ()})
    with pytest.raises(ModelError, match="axes for 3 pairs of dimensions; the model turns 4"):
        context.with_rotary_positions(on_device.zeros((3, 2), jnp.int32), [0, 1, 2])
