"""Layers in a loop give what layers in turn give, and leave weights and cache where they are."""

import collections
import dataclasses
import json
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import (
    CachePlace,
    ForwardBatch,
    KernelSettings,
    KVCache,
    LoadedModel,
    ModelError,
    RopeConfig,
    load_model,
)
from models.carry import Carry
from models.chosen_layer import choose_layer, kind_of
from models.layer_context import LayerContext
from models.layer_loop import PlacedLayer, find_stretches, run_in_loop, run_in_turn
from models.layers.attention import Attention
from models.wants import Wants
from paxkv.runner.memory.kv_cache_arrays import empty_kv_cache
from tests.models.steppers import IN_TURN, fresh_stepper, in_loop, model_of
from tests.oracles.golden import load_golden
from tests.oracles.paged_stepper import NUM_TOKENS, PagedStepper
from tests.oracles.placed_model import place_model
from tests.oracles.recipes import write_recipe

TOLERANCE = 1e-5  # of the largest absolute logit


@pytest.mark.parametrize(
    ("recipe", "only_last_tokens"),
    [
        # Layers of one kind, of two in turn, of two with norms on both sides, of a period of six.
        ("llama", False),
        ("llama", True),
        ("qwen3_layer_types", False),
        ("gemma2", True),
        ("gemma3", False),
        pytest.param("gemma3", True, marks=pytest.mark.slow),
    ],
)
def test_logits_are_those_of_layers_in_turn(recipe, only_last_tokens):
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
        ("llama", False, False),
        ("llama", True, True),
        ("gemma2", True, True),
        pytest.param("qwen3_layer_types", False, True, marks=pytest.mark.slow),
    ],
)
def test_logits_do_not_depend_on_widths(recipe, only_last_tokens, in_loop):
    prompts = {row: sequence.prompt for row, sequence in enumerate(load_golden(recipe))}
    num_prompt_tokens = sum(map(len, prompts.values()))
    # Steps of 3 tokens, of 2, of all prompts, of 1 and of 8: of a width, and between two.
    chunks = [{row: [5 + row] for row in prompts}, {1: [7, 8]}, prompts, {2: [3]}]
    chunks += [{0: [3, 4, 5, 6], 1: [8], 2: [1, 2, 3]}]
    assert 8 < num_prompt_tokens <= NUM_TOKENS
    options = {"loops_over_layers": in_loop, "only_last_tokens": only_last_tokens}
    one, several = (
        fresh_stepper(recipe, **options, widths=widths) for widths in ((), (1, 8, NUM_TOKENS))
    )
    for chunk in chunks:
        wanted, got = one.step(chunk), several.step(chunk)
        for row in chunk:
            assert np.abs(got[row] - wanted[row]).max() <= TOLERANCE * np.abs(wanted[row]).max()


def test_last_of_two_kinds_of_layers_may_go_on_with_fewer_tokens(tmp_path):
    folder = write_recipe(tmp_path / "whole_periods", "qwen3_layer_types")
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": 4, "layer_types": config["layer_types"][:4]}
    (folder / "config.json").write_text(json.dumps(config))
    model = load_model(folder, dtype="float32", load_format="dummy")
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
        ("qwen3_layer_types", False),
    ],
)
def test_program_copies_neither_cache_nor_weights(recipe, only_last_tokens):
    model = model_of(recipe, loops_over_layers=True)
    compiled = lower_step(model, num_blocks=4096, only_last_tokens=only_last_tokens).compile()
    config = model.config
    bytes_of_a_row = 4096 * config.attention[0].num_kv_heads * 8 * config.attention[0].head_dim * 4
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * bytes_of_a_row
    assert memory.temp_size_in_bytes < bytes_of_a_row
    layer_bytes = sum(param.nbytes for param in model.params) // config.num_layers
    assert memory.temp_size_in_bytes < layer_bytes + 2**20


@pytest.mark.parametrize(
    ("recipe", "only_last_tokens", "num_attentions"),
    [
        # Sliding, full, sliding, full, sliding: two periods of two, and the last one in turn.
        ("qwen3_layer_types", False, [5, 3]),
        ("llama", False, [3, 1]),
        # The last layer goes on with fewer tokens, and so is a program of its own.
        ("llama", True, [3, 2]),
    ],
)
def test_attention_is_traced_once_for_each_place_in_the_period(
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


@pytest.mark.parametrize("only_last_tokens", [False, True])
def test_program_grows_with_layers_by_their_products_alone(tmp_path, only_last_tokens):
    counts = []
    for num_layers in (4, 9):
        folder = write_recipe(tmp_path / str(num_layers), "llama")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
        model = load_model(folder, dtype="float32", load_format="dummy")
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
        ("AAAA", [(0, 1, 4)]),
        ("ABABAB", [(0, 2, 3)]),
        ("ABABA", [(0, 2, 2), (4, 1, 1)]),
        # A dense layer before others, and one behind.
        ("ABBBBC", [(0, 1, 1), (1, 1, 4), (5, 1, 1)]),
        ("SSSSSFSSSSSFSS", [(0, 6, 2), (12, 1, 2)]),
        ("ABBBCBC", [(0, 1, 1), (1, 1, 3), (4, 1, 1), (5, 1, 1), (6, 1, 1)]),
        ("ABC", [(0, 1, 1), (1, 1, 1), (2, 1, 1)]),
        ("", []),
    ],
)
def test_stretches_are_the_layers_in_order(kinds, stretches):
    assert find_stretches(kinds) == stretches


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
        self.table = nnx.Param(jnp.full((2, 3, 4), number))

    def __call__(self, carry, kv_cache, context):
        return Carry(hidden=carry.hidden * 2 + self.table[0, 1, 2]), kv_cache


class WithBias(nnx.Module):
    """A layer without any matrix."""

    def __init__(self, number: float) -> None:
        self.bias = nnx.Param(jnp.full(4, number))

    def __call__(self, carry, kv_cache, context):
        return Carry(hidden=carry.hidden * 2 + self.bias[...]), kv_cache


def test_layers_with_large_parameters_of_their_own_run_in_turn():
    layers = [WithBias(1.0), WithTable(2.0), WithTable(3.0), WithBias(4.0), WithBias(5.0)]
    assert len({kind_of(layer) for layer in layers}) == 3
    with pytest.raises(ModelError, match="parameters table would be copied"):
        choose_layer(layers[1:3], jnp.int32(0))
    starts = jnp.asarray([0, 2], jnp.int32)
    tokens = jnp.zeros(2, jnp.int32)
    batch = ForwardBatch(
        token_ids=tokens,
        positions=tokens,
        query_start_loc=starts,
        seq_lens=starts[None, 1:],
        block_tables=jnp.ones((1, 1, 1), jnp.int32),
        logits_indices=tokens,
    )
    context = LayerContext(batch=batch, kernels=KernelSettings(), slots=tokens[None], cos_sin={})
    placed = [
        PlacedLayer(layer, CachePlace(group_idx=0, row=row)) for row, layer in enumerate(layers)
    ]
    cache = KVCache(k=jnp.zeros(1), v=jnp.zeros(1))
    carry = Carry(hidden=jnp.ones((2, 4)))
    in_turn, in_loop = (run(placed, carry, cache, context)[0] for run in (run_in_turn, run_in_loop))
    np.testing.assert_array_equal(in_loop.hidden, in_turn.hidden)
    # 1 -> 3 -> 8 -> 19 -> 42 -> 89
    assert float(in_loop.hidden[0, 0]) == 89


def lower_step(
    model: LoadedModel, *, num_blocks: int, only_last_tokens: bool
) -> jax.stages.Lowered:
    """Of two requests, over a cache of blocks of 8 tokens: one token each, or two."""
    placed = place_model(model, block_size=8)
    num_groups = placed.num_groups
    cache = jax.eval_shape(lambda: empty_kv_cache(placed.cache_config(num_blocks)))
    num_new = 2 if only_last_tokens else 1
    starts = num_new * jnp.arange(3, dtype=jnp.int32)
    batch = ForwardBatch(
        token_ids=jnp.zeros(2 * num_new, jnp.int32),
        positions=jnp.zeros(2 * num_new, jnp.int32),
        query_start_loc=starts,
        seq_lens=jnp.full((num_groups, 2), num_new, jnp.int32),
        block_tables=jnp.ones((num_groups, 2, 4), jnp.int32),
        logits_indices=starts[1:] - 1,
        max_query_len=None if only_last_tokens else 1,
        wants=Wants(logits="last" if only_last_tokens else "indices"),
    )
    step = jax.jit(placed.model.forward, donate_argnums=1)
    return step.lower(model.params, cache, batch)
