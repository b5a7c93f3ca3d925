"""`LoadedModel` is static structure and a flat tuple; its functions are pure."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import AttentionFormat, CachePlace, ModelError
from models.config.attention_config import SELF_ATTENTION
from models.families.llama import LlamaForCausalLM
from models.forward.forward_batch import ForwardBatch, GroupInputs
from models.layers.linear import Linear
from models.loading.load_model import load_model
from models.loading.loaded_model import LoadedModel
from models.platforms import CPU
from models.registry import FAMILIES
from tests.oracles.make_checkpoint import write_random_checkpoint
from tests.oracles.placed_model import place_model


def test_params_are_a_flat_tuple_with_a_name_each(tmp_path):
    loaded = load_model(write_random_checkpoint(tmp_path, num_layers=1))
    assert isinstance(loaded, LoadedModel)
    assert all(isinstance(param, jax.Array) for param in loaded.params)
    assert len(loaded.param_names) == len(set(loaded.param_names)) == len(loaded.params)
    assert "layers.0.self_attn.q_proj.kernel" in loaded.param_names


def test_functions_use_the_params_they_are_given(tmp_path):
    loaded = load_model(write_random_checkpoint(tmp_path, num_layers=1))
    hidden = np.ones((2, loaded.config.hidden_size), np.float32)
    compute_logits = jax.jit(loaded.compute_logits)
    logits = compute_logits(loaded.params, hidden)
    doubled = compute_logits(tuple(2 * np.asarray(param) for param in loaded.params), hidden)
    assert (logits.shape, logits.dtype) == ((2, 160), jnp.float32)
    np.testing.assert_allclose(doubled, 2 * logits, rtol=1e-6)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_tied_head_is_stored_once_in_rows_or_columns_or_copied(tmp_path, family):
    folder = write_random_checkpoint(tmp_path, family, num_layers=1, tie=True)
    hidden = np.random.RandomState(0).standard_normal((3, 64)).astype(np.float32)
    token_ids = np.array([0, 159, 7, 7])
    found = {}
    for has, num_threads in ((("avx2",), 2), (("avx2", "avx512f"), 2), ((), 1)):
        platform = CPU(num_threads=num_threads, instruction_sets=frozenset(has))
        panel_width = None if has else 64
        loaded = load_model(folder, dtype="float32", platform=platform, panel_width=panel_width)
        params = dict(zip(loaded.param_names, loaded.params, strict=True))

        @jax.jit
        def logits_and_rows(params, hidden, token_ids, loaded=loaded):
            tree = jax.tree.unflatten(loaded.params_treedef, params)
            model = nnx.merge(loaded.graphdef, tree)
            return loaded.compute_logits(params, hidden), model.embed_tokens(token_ids)

        tables = tuple(
            array.shape for name, array in params.items() if name.startswith(("embed", "lm_head"))
        )
        found[tables] = jax.device_get(logits_and_rows(loaded.params, hidden, token_ids))
    panels = ((64, 64), (64, 64), (64, 32))
    assert found.keys() == {((64, 160),), ((160, 64),), ((160, 64), *panels)}
    first, *others = found.values()
    for logits, rows in others:
        np.testing.assert_allclose(logits, first[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(rows, first[1])


def test_cache_keeps_its_shape_and_dtype(tmp_path):
    model = load_model(write_random_checkpoint(tmp_path, num_layers=1))
    loaded = place_model(model, block_size=8).model
    batch = _abstract_batch(num_tokens=8, num_reqs=2)
    outputs, pages = jax.eval_shape(loaded.forward, loaded.params, PAGES, batch)
    for_logits = outputs.for_logits
    assert (for_logits.shape, for_logits.dtype) == ((2, 64), jnp.float32)
    assert (pages.shape, pages.dtype) == (PAGES.shape, PAGES.dtype)


def test_embedding_and_layers_see_the_context_that_the_caller_changes(tmp_path):
    model = load_model(write_random_checkpoint(tmp_path, num_layers=1))
    loaded = place_model(model, block_size=8).model

    def embed_the_next_id(context):
        batch = dataclasses.replace(context.batch, token_ids=context.batch.token_ids + 1)
        return dataclasses.replace(context, batch=batch)

    def write_nothing(context):
        slots = jax.tree.map(lambda slots: jnp.full_like(slots, 2**20), context.slots)
        return dataclasses.replace(context, slots=slots)

    @jax.jit
    def run(params, kv_cache, batch):
        next_ids = dataclasses.replace(batch, token_ids=batch.token_ids + 1)
        changed, _ = loaded.forward(params, kv_cache, batch, embed_the_next_id)
        expected, written = loaded.forward(params, kv_cache, next_ids)
        _, unwritten = loaded.forward(params, kv_cache, batch, write_nothing)
        return changed.for_logits, expected.for_logits, written, unwritten

    batch = jax.tree.map(
        lambda array: np.zeros(array.shape, array.dtype), _abstract_batch(num_tokens=8, num_reqs=1)
    )
    batch = dataclasses.replace(
        batch,
        token_ids=np.arange(8, dtype=np.int32),
        positions=np.arange(8, dtype=np.int32),
        query_start_loc=np.array([0, 8], np.int32),
        logits_indices=np.array([7], np.int32),
    )
    zeros = np.zeros(PAGES.shape, PAGES.dtype)
    outputs = run(loaded.params, zeros, batch)
    changed, expected, written, unwritten = jax.device_get(outputs)
    np.testing.assert_allclose(changed, expected, rtol=1e-5)
    assert np.any(written != 0) and not np.any(unwritten != 0)


def test_each_layer_needs_a_place_in_the_cache(tmp_path):
    loaded = load_model(write_random_checkpoint(tmp_path, num_layers=2))
    with pytest.raises(ModelError, match="no places in a KV cache"):
        loaded.forward(loaded.params, None, _abstract_batch(num_tokens=8, num_reqs=2))
    with pytest.raises(ModelError, match="for 1 layers; the model has 2"):
        loaded.with_places([((SELF_ATTENTION, _place()),)])


@pytest.mark.parametrize("index", ["inputs_idx", "group_idx", "row"])
def test_a_place_that_the_cache_does_not_have_is_refused(tmp_path, index):
    """JAX would read and write the last group or row."""
    place = _place(**{index: 1})
    model = load_model(write_random_checkpoint(tmp_path, num_layers=1))
    loaded = model.with_places([((SELF_ATTENTION, place),)])
    batch = _abstract_batch(num_tokens=8, num_reqs=2)
    message = (
        rf"'self_attn' is in group {place.group_idx} of the inputs {place.inputs_idx}, "
        rf"row {place.row}; the batch has inputs of \[1\] groups, and the pages have 1 rows"
    )
    with pytest.raises(ModelError, match=message):
        jax.eval_shape(loaded.forward, loaded.params, PAGES, batch)


def test_dtype_is_not_that_of_rounded_kernels(tmp_path, monkeypatch):
    """Even if the first parameter is a kernel of integers. Keys and values have `dtype`."""
    monkeypatch.setitem(FAMILIES, "LlamaForCausalLM", f"{__name__}:LlamaWithAdapter")
    folder = write_random_checkpoint(tmp_path, num_layers=1)
    loaded = load_model(folder, load_format="dummy", dtype="bfloat16", product_dtype="int8")
    assert loaded.param_names[0] == "adapter.kernel.numbers" and loaded.params[0].dtype == jnp.int8
    assert loaded.dtype == "bfloat16"


class LlamaWithAdapter(LlamaForCausalLM):
    """Its first parameter is a kernel."""

    def __init__(self, config, *, has_head_kernel, dtype):
        super().__init__(config, has_head_kernel=has_head_kernel, dtype=dtype)
        self.adapter = Linear(2, 2, dtype=dtype)


def test_packages_include_its_layers_and_their_bases(tmp_path, monkeypatch):
    folder = write_random_checkpoint(tmp_path, num_layers=1)
    assert load_model(folder).packages == {"models"}
    monkeypatch.setitem(FAMILIES, "LlamaForCausalLM", f"{__name__}:ForeignLlama")
    assert load_model(folder).packages == {"models", "tests"}


class ForeignLlama(LlamaForCausalLM):
    """A class outside of the package `models`."""


# One row of 4 blocks of 8 tokens, with 2 heads of 16 numbers.
PAGES = jax.ShapeDtypeStruct((1, 4, 2 * 2 * 8 * 16), jnp.float32)


def _place(**indices):
    cache = AttentionFormat(num_kv_heads=2, head_dim=16, dtype="float32")
    return CachePlace(format=cache, **{"inputs_idx": 0, "group_idx": 0, "row": 0} | indices)


def _abstract_batch(num_tokens, num_reqs):
    def i32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    return ForwardBatch(
        token_ids=i32(num_tokens),
        positions=i32(num_tokens),
        query_start_loc=i32(num_reqs + 1),
        groups=(
            GroupInputs(block_tables=i32(1, num_reqs, 2), seq_lens=i32(num_reqs), block_size=8),
        ),
        logits_indices=i32(num_reqs),
    )


def test_tokens_that_are_left_out_have_no_probability(tmp_path):
    loaded = load_model(write_random_checkpoint(tmp_path, num_layers=1))
    (eos_id, *_) = loaded.config.eos_token_ids
    hidden = np.random.RandomState(0).standard_normal((2, 64)).astype(np.float32)
    whole = jax.device_get(jax.jit(loaded.compute_logits)(loaded.params, hidden))
    padded = loaded.without_tokens([159, 7, eos_id, 500])
    logits = np.array(jax.jit(padded.compute_logits)(loaded.params, hidden))
    assert (logits[:, [7, 159]] == -np.inf).all()
    logits[:, [7, 159]] = whole[:, [7, 159]]
    np.testing.assert_array_equal(logits, whole)
    assert padded.unused_token_ids == (7, 159)
