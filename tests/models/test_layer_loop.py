"""Layers in a loop give what layers in turn give, and leave weights and cache where they are."""

import dataclasses
import functools
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import ForwardBatch, KVCache, LoadedModel, kv_cache_layers, layer_loop, load_model
from models.kv_layers import place_layers
from tests.oracles.golden import load_golden
from tests.oracles.paged_stepper import PagedStepper
from tests.oracles.recipes import write_recipe

TOLERANCE = 1e-5  # of the largest absolute logit
# Layers of one kind, of two in turn, and of two with norms on both sides.
LAYERED = ("llama", "qwen3_layer_types", "gemma3")


@functools.cache
def models_in_turn_and_in_loop(recipe: str) -> tuple[LoadedModel, LoadedModel]:
    with tempfile.TemporaryDirectory() as folder:
        in_turn = load_model(write_recipe(Path(folder) / recipe, recipe), dtype="float32")
    kernels = dataclasses.replace(in_turn.kernels, loops_over_layers=True)
    return in_turn, in_turn.with_kernels(kernels)


@pytest.mark.parametrize(
    ("recipe", "only_last_tokens"), [*((recipe, False) for recipe in LAYERED), (LAYERED[0], True)]
)
def test_logits_are_those_of_layers_in_turn(recipe, only_last_tokens):
    prompts = {row: sequence.prompt for row, sequence in enumerate(load_golden(recipe))}
    chunks = [prompts, {row: [7 + row] for row in prompts}, {0: [3], 2: [4, 5]}]
    steppers = [
        PagedStepper(model, only_last_tokens=only_last_tokens)
        for model in models_in_turn_and_in_loop(recipe)
    ]
    for chunk in chunks:
        in_turn, in_loop = (stepper.step(chunk) for stepper in steppers)
        for row in chunk:
            scale = np.abs(in_turn[row]).max()
            assert np.abs(in_loop[row] - in_turn[row]).max() <= TOLERANCE * scale


@pytest.mark.parametrize("recipe", ["llama", "qwen3_layer_types"])
def test_program_copies_neither_cache_nor_weights(recipe):
    model = models_in_turn_and_in_loop(recipe)[1]
    compiled = compile_decode(model, num_blocks=4096)
    config = model.config
    bytes_of_a_row = 4096 * config.num_kv_heads * 8 * config.head_dim * 4
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * bytes_of_a_row
    assert memory.temp_size_in_bytes < bytes_of_a_row
    layer_bytes = sum(param.nbytes for param in model.params) // config.num_layers
    assert memory.temp_size_in_bytes < layer_bytes + 2**20


def test_attention_is_traced_once_for_each_place_in_the_period(monkeypatch):
    counts = []
    for model in models_in_turn_and_in_loop("qwen3_layer_types"):
        attention_class = layer_loop.Attention
        num_traces, attend = 0, attention_class.attend

        def counting(self, *args, **kwargs):
            nonlocal num_traces
            num_traces += 1
            return attend(self, *args, **kwargs)  # noqa: B023

        with monkeypatch.context() as patch:
            patch.setattr(attention_class, "attend", counting)
            compile_decode(model, num_blocks=8)
        counts.append(num_traces)
    # Sliding, full, sliding, full, sliding: two periods of two, and the last one in turn.
    assert counts == [5, 3]


def compile_decode(model: LoadedModel, *, num_blocks: int) -> jax.stages.Compiled:
    """One token each of two requests, over a cache of blocks of 8 tokens."""
    config = model.config
    placements = place_layers(kv_cache_layers(config)).values()
    num_rows = 1 + max(placement.row for placement in placements)
    num_groups = 1 + max(placement.group_idx for placement in placements)
    shape = (num_rows, num_blocks, config.num_kv_heads, 8, config.head_dim)
    cache = jax.ShapeDtypeStruct(shape, jnp.float32)
    batch = ForwardBatch(
        token_ids=jnp.zeros(2, jnp.int32),
        positions=jnp.zeros(2, jnp.int32),
        query_start_loc=jnp.arange(3, dtype=jnp.int32),
        seq_lens=jnp.ones((num_groups, 2), jnp.int32),
        block_tables=jnp.ones((num_groups, 2, 4), jnp.int32),
        logits_indices=jnp.arange(2, dtype=jnp.int32),
        max_query_len=1,
    )
    step = jax.jit(model.forward, donate_argnums=1)
    return step.lower(model.params, KVCache(k=cache, v=cache), batch).compile()
