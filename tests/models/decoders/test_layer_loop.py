"""Layers in a loop give what layers in turn give, and leave weights and cache where they are."""

import collections
import dataclasses
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from models import (
    AttentionFormat,
    CachePlace,
    ForwardBatch,
    GroupInputs,
    KernelSettings,
    LayerPlaces,
    LoadedModel,
    ModelError,
    RopeConfig,
    load_model,
)
from models.config.attention_config import SELF_ATTENTION
from models.decoders.chosen_layer import choose_layer, kind_of
from models.decoders.layer_loop import PlacedLayer, find_stretches, run_in_loop, run_in_turn
from models.forward.carry import Carry
from models.forward.layer_context import LayerContext
from models.forward.wants import Wants
from models.layers.attention import Attention
from models.layers.linear import Linear
from paxkv.runner.programs.make_batch import make_batch
from tests.compiler_flags import AS_FOR_USERS
from tests.models.steppers import IN_TURN, fresh_stepper, in_loop, model_of
from tests.oracles.golden import load_golden
from tests.oracles.make_checkpoint import write_random_checkpoint
from tests.oracles.paged_stepper import NUM_TOKENS, PagedStepper
from tests.oracles.placed_model import place_model
from tests.oracles.recipes import RECIPES

TOLERANCE = 1e-5  # of the largest absolute logit


# In the normal run, `test_decoder.py` compares layers in loops with transformers.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "only_last_tokens"),
    [
        # Layers of one kind, of two in turn, of two with norms on both sides, of a period of six.
        ("llama", False),
        ("llama", True),
        ("qwen3_layer_types", False),
        ("gemma2", True),
        ("gemma3", False),
        ("gemma3", True),
    ],
)
def test_logits_equal_layers_in_turn(recipe, only_last_tokens):
    prompts = {row: sequence.prompt for row, sequence in enumerate(load_golden(recipe))}
    chunks = [prompts, {row: [7 + row] for row in prompts}, {0: [3], 2: [4, 5]}]
    steppers = [
        fresh_stepper(recipe, loops_over_layers=in_loop, only_last_tokens=only_last_tokens)
        for in_loop in (False, True)
    ]
    for chunk in chunks:
        in_turn, in_loop = (stepper.step(chunk) for stepper in steppers)
        for row in chunk:
            scale = np.abs(in_turn[row]).max()
            assert np.abs(in_loop[row] - in_turn[row]).max() <= TOLERANCE * scale


@pytest.mark.parametrize(
    ("recipe", "only_last_tokens", "in_loop"),
    [
        pytest.param("llama", False, False, marks=pytest.mark.slow),
        ("llama", True, True),
        pytest.param("gemma2", True, True, marks=pytest.mark.slow),
        pytest.param("qwen3_layer_types", False, True, marks=pytest.mark.slow),
    ],
)
def test_logits_do_not_depend_on_widths(recipe, only_last_tokens, in_loop):
    prompts = {row: sequence.prompt for row, sequence in enumerate(load_golden(recipe))}
    num_prompt_tokens = sum(map(len, prompts.values()))
    # Steps of 3 tokens, 2, all prompts, 1 and 8. The last one fills a width, the others fill none.
    chunks = [{row: [5 + row] for row in prompts}, {1: [7, 8]}, prompts, {2: [3]}]
    chunks += [{0: [3, 4, 5, 6], 1: [8], 2: [1, 2, 3]}]
    assert 8 < num_prompt_tokens <= NUM_TOKENS
    options = {"loops_over_layers": in_loop, "only_last_tokens": only_last_tokens}
    one, several = (
        fresh_stepper(recipe, **options, widths=widths) for widths in ((), (8, NUM_TOKENS))
    )
    for chunk in chunks:
        wanted, got = one.step(chunk), several.step(chunk)
        for row in chunk:
            assert np.abs(got[row] - wanted[row]).max() <= TOLERANCE * np.abs(wanted[row]).max()


# In the normal run, Gemma 2 has a last layer of a kind that other layers of the loop have too.
@pytest.mark.slow
def test_last_of_two_kinds_of_layers_may_go_on_with_fewer_tokens(tmp_path):
    fields = RECIPES["qwen3_layer_types"]["extra_config"]
    fields = fields | {"layer_types": fields["layer_types"][:4]}
    recipe = RECIPES["qwen3_layer_types"] | {"num_layers": 4, "extra_config": fields}
    model = load_model(write_random_checkpoint(tmp_path, **recipe), dtype="float32")
    in_turn = dataclasses.replace(model, platform=IN_TURN)
    wanted, got = (
        PagedStepper(model, only_last_tokens=True).step({0: [5, 6, 7], 1: [8], 2: [9, 10]})
        for model in (in_turn, in_loop(in_turn))
    )
    for row in wanted:
        assert np.abs(got[row] - wanted[row]).max() <= TOLERANCE * np.abs(wanted[row]).max()


@pytest.mark.parametrize(
    ("recipe", "only_last_tokens"),
    [
        pytest.param("llama", False, marks=pytest.mark.slow),
        ("llama", True),
        pytest.param("qwen3_layer_types", False, marks=pytest.mark.slow),
    ],
)
def test_program_copies_neither_cache_nor_weights(recipe, only_last_tokens):
    model = model_of(recipe, loops_over_layers=True).with_kernels(KernelSettings())
    compiled = lower_step(model, num_blocks=4096, only_last_tokens=only_last_tokens).compile(
        AS_FOR_USERS
    )
    config = model.config
    bytes_of_a_row = 4096 * config.attention[0].num_kv_heads * 8 * config.attention[0].head_dim * 4
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * bytes_of_a_row  # K and V of one row at least
    assert memory.temp_size_in_bytes < bytes_of_a_row
    layer_bytes = sum(param.nbytes for param in model.params) // config.num_layers
    assert memory.temp_size_in_bytes < layer_bytes + 2**20


@pytest.mark.parametrize(
    ("recipe", "only_last_tokens", "num_attentions"),
    [
        # Sliding, full, sliding, full, sliding.
        ("qwen3_layer_types", False, [5, 2]),
        pytest.param("llama", False, [3, 1], marks=pytest.mark.slow),
        # The last layer goes on with fewer tokens, and so is a program of its own.
        ("llama", True, [3, 2]),
    ],
)
def test_attention_is_traced_once_for_each_kind_of_layer(
    recipe, only_last_tokens, num_attentions, monkeypatch
):
    counts = []
    for model in (model_of(recipe), model_of(recipe, loops_over_layers=True)):
        num_traces, attend = 0, Attention.attend

        def counting(self, *args, **kwargs):
            nonlocal num_traces
            num_traces += 1
            return attend(self, *args, **kwargs)  # noqa: B023

        with monkeypatch.context() as patch:
            patch.setattr(Attention, "attend", counting)
            lower_step(model, num_blocks=8, only_last_tokens=only_last_tokens)
        counts.append(num_traces)
    assert counts == num_attentions


@pytest.mark.parametrize("only_last_tokens", [pytest.param(False, marks=pytest.mark.slow), True])
def test_program_grows_with_layers_by_their_products_alone(tmp_path, only_last_tokens):
    counts = []
    for num_layers in (4, 9):
        recipe = RECIPES["llama"] | {"num_layers": num_layers}
        folder = write_random_checkpoint(tmp_path / str(num_layers), **recipe)
        model = load_model(folder, dtype="float32")
        lowered = lower_step(in_loop(model), num_blocks=8, only_last_tokens=only_last_tokens)
        counts.append(collections.Counter(re.findall(r' = "?(\w+\.\w+)', lowered.as_text())))
    few, many = counts
    assert few["stablehlo.rsqrt"] >= 2
    grown = {name: many[name] - few[name] for name in many if many[name] != few[name]}
    # Of the five more layers q, k, v, o, gate, up and down.
    assert grown == {"stablehlo.dot_general": 5 * 7}


@pytest.mark.parametrize(
    ("kinds", "stretches"),
    [
        ("AAAA", [(0, ((4,),))]),
        ("ABABAB", [(0, ((1, 1), (1, 1), (1, 1)))]),
        ("ABABA", [(0, ((1, 1), (1, 1), (1, 0)))]),
        # A dense layer before others, and one after them.
        ("ABBBBC", [(0, ((1,),)), (1, ((4,),)), (5, ((1,),))]),
        ("SSSSSFSSSSSFSS", [(0, ((5, 1), (5, 1), (2, 0)))]),
        ("ABBBCBC", [(0, ((1,),)), (1, ((3, 1), (1, 1)))]),
        # Without a period, and with a kind between the others that occurs once.
        ("ABBACAAB", [(0, ((1, 2, 0), (1, 0, 1), (2, 1, 0)))]),
        ("ABC", [(0, ((1,),)), (1, ((1,),)), (2, ((1,),))]),
        ("", []),
    ],
)
def test_stretches_are_the_layers_in_order(kinds, stretches):
    assert find_stretches(kinds) == stretches


@given(st.text("ABCD", max_size=20))
def test_stretches_have_every_layer_once_and_every_kind_in_one_of_them(kinds):
    stretches = find_stretches(kinds)
    order, kinds_of_stretches = [], []
    for stretch in stretches:
        assert stretch.start == len(order)
        num_kinds = len(stretch.counts[0])
        of_kinds = [stretch.layers_of(kind_idx) for kind_idx in range(num_kinds)]
        for idxs in of_kinds:
            assert idxs
            assert len({kinds[idx] for idx in idxs}) == 1
        kinds_of_stretches += [kinds[idxs[0]] for idxs in of_kinds]
        for counts in stretch.counts:
            for idxs, count in zip(of_kinds, counts, strict=True):
                order += idxs[:count]
                del idxs[:count]
    assert order == list(range(len(kinds)))
    assert sorted(kinds_of_stretches) == sorted(set(kinds))


def set_attention(layer: nnx.Module, **fields: object) -> None:
    layer.self_attn.config = dataclasses.replace(layer.self_attn.config, **fields)


def changed(layer: nnx.Module, change: Callable[[nnx.Module], None]) -> nnx.Module:
    graphdef, state = nnx.split(layer)
    other = nnx.merge(graphdef, state)
    change(other)
    return other


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: set_attention(layer, rope=RopeConfig(theta=7.0)),
        lambda layer: set_attention(layer, sliding_window=7),
        lambda layer: setattr(layer.self_attn, "q_norm", nnx.data(layer.input_layernorm)),
        lambda layer: setattr(layer, "mlp", layer.mlp.up_proj),
        lambda layer: layer.mlp.up_proj.kernel.set_value(jnp.zeros((96, 8))),
    ],
)
def test_layers_that_differ_in_more_than_numbers_are_of_another_kind(change):
    first, second, *_ = layers_of("llama")
    assert kind_of(first) == kind_of(second)
    assert kind_of(changed(second, change)) != kind_of(first)


def layers_of(recipe: str) -> nnx.List:
    model = model_of(recipe)
    state = jax.tree.unflatten(model.params_treedef, model.params)
    return nnx.merge(model.graphdef, state).layers


class WithTable(nnx.Module):
    """A layer with a parameter that a switch would copy, as a stack of experts would be."""

    def __init__(self, number: float) -> None:
        self.table = nnx.Param(jax.device_put(np.full((2, 3, 4), number, np.float32)))

    def __call__(self, carry, pages, context):
        return Carry(hidden=carry.hidden * 2 + self.table[0, 1, 2]), pages


class WithBias(nnx.Module):
    """A layer without any matrix."""

    def __init__(self, number: float) -> None:
        self.bias = nnx.Param(jax.device_put(np.full(4, number, np.float32)))

    def __call__(self, carry, pages, context):
        return Carry(hidden=carry.hidden * 2 + self.bias[...]), pages


class WithCache(nnx.Module):
    """A layer whose output says where it and its cache are; it counts how often it is traced."""

    num_traces = 0

    def __init__(self) -> None:
        self.bias = nnx.Param(jax.device_put(np.zeros(4, np.float32)))

    def __call__(self, carry, pages, context):
        WithCache.num_traces += 1
        cache = context.cache(SELF_ATTENTION)
        table_entry = cache.block_tables[0, 0]
        # Of the row, the block table, the block size, the format, and the layer.
        number = cache.row + 10 * table_entry + 100 * cache.block_size
        number = number + 10_000 * cache.format.head_dim + cache.slots[0] + cache.seq_lens[0]
        number = number + 100_000 * context.layer_idx
        return Carry(hidden=carry.hidden * 2 + self.bias[...] + number), pages


def test_layers_with_large_parameters_of_their_own_run_in_turn():
    layers = [WithBias(1.0), WithTable(2.0), WithTable(3.0), WithBias(4.0), WithBias(5.0)]
    assert len({kind_of(layer) for layer in layers}) == 3
    with pytest.raises(ModelError, match="parameters table would be copied"):
        choose_layer(layers[1:3], jnp.int32(0))
    in_turn, in_loop = run_both(layers, [place_at(row) for row in range(5)])
    np.testing.assert_array_equal(in_loop, in_turn)
    # 1 -> 3 -> 8 -> 19 -> 42 -> 89
    assert float(in_loop[0, 0]) == 89


NARROW = AttentionFormat(num_kv_heads=1, head_dim=8, dtype="float32")
WIDE = dataclasses.replace(NARROW, head_dim=16)


def place_at(row: int, *, cache=NARROW, inputs_idx=0, group_idx=0) -> LayerPlaces:
    place = CachePlace(format=cache, inputs_idx=inputs_idx, group_idx=group_idx, row=row)
    return ((SELF_ATTENTION, place),)


@pytest.mark.parametrize(
    ("places", "num_parts"),
    [
        # A loop picks the group and the row of its layer.
        ([place_at(row, group_idx=row % 2) for row in range(4)], 1),
        # Of one format, then of another: two loops.
        ([place_at(0), place_at(1), place_at(0, cache=WIDE), place_at(1, cache=WIDE)], 2),
        # By turns of two formats, or of two block sizes: one loop with both in its body.
        ([place_at(row, cache=(NARROW, WIDE)[row % 2]) for row in range(4)], 2),
        ([place_at(row, inputs_idx=row % 2, group_idx=0) for row in range(4)], 2),
        # Of two formats without a period: both in a loop of their own, within a loop.
        ([place_at(row, cache=(NARROW, WIDE)[int(i)]) for row, i in enumerate("0110001")], 2),
        # No two next to each other alike in format and block size.
        ([place_at(0), place_at(0, cache=WIDE), place_at(0, inputs_idx=1)], 3),
    ],
)
def test_layers_that_differ_only_in_places_find_their_own_caches(places, num_parts):
    WithCache.num_traces = 0
    in_turn, in_loop = run_both([WithCache() for _ in places], places)
    np.testing.assert_array_equal(in_loop, in_turn)
    assert WithCache.num_traces == len(places) + num_parts


class WithMatrix(WithCache):
    """A layer with a matrix, whose output says where its cache is."""

    def __init__(self, number: float) -> None:
        self.bias = nnx.Param(jax.device_put(np.zeros(4, np.float32)))
        self.linear = Linear(4, 4, dtype=jnp.float32)
        self.linear.kernel.set_value(jax.device_put(number * np.eye(4, dtype=np.float32)))

    def __call__(self, carry, pages, context):
        carry, pages = super().__call__(carry, pages, context)
        return Carry(hidden=self.linear(carry.hidden, context)), pages


def test_layer_at_several_places_has_a_cache_at_each_and_one_product():
    first, second = WithMatrix(0.5), WithMatrix(0.25)
    layers = [first, second, second, first, second]
    places = [place_at(row, group_idx=row % 2) for row in range(5)]
    in_turn, in_loop = run_both(layers, places)
    np.testing.assert_array_equal(in_loop, in_turn)
    # Other layers with the same weights have the same output.
    copies = [WithMatrix(number) for number in (0.5, 0.25, 0.25, 0.5, 0.25)]
    np.testing.assert_array_equal(run_both(copies, places)[0], in_turn)
    for placed_layers, num_products in ((layers, 2), (copies, 5)):
        placed, carry, context = placed_in_step(placed_layers, places)
        program = jax.make_jaxpr(
            lambda pages, placed=placed, carry=carry, context=context: (
                run_in_loop(placed, carry, pages, context)[0].hidden
            )
        )(jnp.zeros(1))
        assert str(program).count("dot_general[") == num_products


def run_both(layers: list[nnx.Module], places: list[LayerPlaces]) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states after the layers in turn, and in a loop."""
    placed, carry, context = placed_in_step(layers, places)

    def run_all(pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        in_turn, _ = run_in_turn(placed, carry, pages, context)
        in_loop, _ = run_in_loop(placed, carry, pages, context)
        return in_turn.hidden, in_loop.hidden

    return jax.device_get(jax.jit(run_all)(np.zeros(1, np.float32)))


def placed_in_step(
    layers: list[nnx.Module], places: list[LayerPlaces]
) -> tuple[list[PlacedLayer], Carry, LayerContext]:
    """The layers, what the first one gets, and a step; two groups of each block size."""
    tokens = np.zeros(2, np.int32)
    groups = tuple(
        GroupInputs(
            block_tables=np.array([[[1 + 2 * idx]], [[2 + 2 * idx]]], np.int32),
            seq_lens=np.array([2], np.int32),
            block_size=block_size,
        )
        for idx, block_size in enumerate((8, 16))
    )
    batch = ForwardBatch(
        token_ids=tokens,
        positions=tokens,
        query_start_loc=np.array([0, 2], np.int32),
        groups=groups,
        logits_indices=tokens,
    )
    slots = tuple(inputs.block_size * inputs.block_tables[:, :, 0] for inputs in groups)
    batch, slots = jax.device_put((batch, slots))
    context = LayerContext(batch=batch, kernels=KernelSettings(), slots=slots, cos_sin={})
    placed = list(map(PlacedLayer, layers, range(len(layers)), places))
    return placed, Carry(hidden=np.ones((2, 4), np.float32)), context


def lower_step(
    model: LoadedModel, *, num_blocks: int, only_last_tokens: bool
) -> jax.stages.Lowered:
    """Of two requests, over a cache of blocks of 8 tokens: one token each, or two."""
    placed = place_model(model, block_size=8)
    tables = placed.tables(max_model_len=32)
    pages = jax.eval_shape(lambda: placed.empty_pages(num_blocks))
    num_new = 2 if only_last_tokens else 1
    starts = num_new * np.arange(3, dtype=np.int32)
    batch = make_batch(
        token_ids=np.zeros(2 * num_new, np.int32),
        positions=np.zeros(2 * num_new, np.int32),
        query_start_loc=starts,
        seq_lens=np.full(2, num_new, np.int32),
        block_tables=[np.ones(table.dims(num_reqs=2), np.int32) for table in tables],
        table_shapes=tables,
        logits_indices=starts[1:] - 1,
        max_query_len=None if only_last_tokens else 1,
        wants=Wants(logits="last" if only_last_tokens else "indices"),
    )
    step = jax.jit(placed.model.forward, donate_argnums=1)
    return step.lower(model.params, pages, batch)
