"""`LoadedModel` is static structure and a flat tuple; its functions are pure."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import CachePlace, ModelError
from models.families.llama import LlamaForCausalLM
from models.forward_batch import ForwardBatch, KVCache
from models.layers.linear import Linear
from models.loading.load_model import load_model
from models.loading.loaded_model import LoadedModel
from models.platforms import CPU, GPU
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
    hidden = jnp.ones((2, loaded.config.hidden_size))
    compute_logits = jax.jit(loaded.compute_logits)
    logits = compute_logits(loaded.params, hidden)
    doubled = compute_logits(tuple(param * 2 for param in loaded.params), hidden)
    assert (logits.shape, logits.dtype) == ((2, 160), jnp.float32)
    np.testing.assert_allclose(doubled, 2 * logits, rtol=1e-6)


def test_tied_head_without_a_copy_gives_the_same_logits(tmp_path):
    folder = write_random_checkpoint(tmp_path, num_layers=1, tie=True)
    hidden = jnp.asarray(np.random.RandomState(0).standard_normal((3, 64)), jnp.float32)
    logits = {}
    platforms = {"cpu": CPU.of_this_machine(), "gpu": GPU()}
    for name, platform in platforms.items():  # only a CPU keeps the transposed copy
        loaded = load_model(folder, dtype="float32", platform=platform)
        assert ("lm_head.kernel" in loaded.param_names) == (name == "cpu")
        logits[name] = loaded.compute_logits(loaded.params, hidden)
    np.testing.assert_allclose(logits["cpu"], logits["gpu"], rtol=1e-5, atol=1e-5)


def test_cache_keeps_its_shape_and_dtype(tmp_path):
    model = load_model(write_random_checkpoint(tmp_path, num_layers=1))
    loaded = place_model(model, block_size=8).model
    cache = jax.ShapeDtypeStruct((1, 4, 2, 8, 16), jnp.float32)
    batch = _abstract_batch(num_tokens=8, num_reqs=2)
    outputs, kv_cache = jax.eval_shape(
        loaded.forward, loaded.params, KVCache(k=cache, v=cache), batch
    )
    for_logits = outputs.for_logits
    assert (for_logits.shape, for_logits.dtype) == ((2, 64), jnp.float32)
    assert (kv_cache.k.shape, kv_cache.v.dtype) == (cache.shape, cache.dtype)


def test_each_layer_needs_a_place_in_the_cache(tmp_path):
    loaded = load_model(write_random_checkpoint(tmp_path, num_layers=2))
    with pytest.raises(ModelError, match="no places in a KV cache"):
        loaded.forward(loaded.params, None, _abstract_batch(num_tokens=8, num_reqs=2))
    with pytest.raises(ModelError, match="for 1 layers; the model has 2"):
        loaded.with_places([CachePlace(group_idx=0, row=0)])


@pytest.mark.parametrize("place", [CachePlace(group_idx=1, row=0), CachePlace(group_idx=0, row=1)])
def test_a_place_that_the_cache_does_not_have_is_refused(tmp_path, place):
    """JAX would read and write the last group or row."""
    loaded = load_model(write_random_checkpoint(tmp_path, num_layers=1)).with_places([place])
    cache = jax.ShapeDtypeStruct((1, 4, 2, 8, 16), jnp.float32)
    batch = _abstract_batch(num_tokens=8, num_reqs=2)
    message = f"in group {place.group_idx}, row {place.row}; the batch has 1 groups and the cache 1"
    with pytest.raises(ModelError, match=message):
        jax.eval_shape(loaded.forward, loaded.params, KVCache(k=cache, v=cache), batch)


def test_dtype_is_not_that_of_rounded_kernels(tmp_path, monkeypatch):
    """Keys and values are stored in it; parameters are in the order of their names."""
    monkeypatch.setitem(FAMILIES, "LlamaForCausalLM", f"{__name__}:LlamaWithAdapter")
    folder = write_random_checkpoint(tmp_path, num_layers=1)
    loaded = load_model(folder, load_format="dummy", dtype="bfloat16", product_dtype="int8")
    assert loaded.param_names[0] == "adapter.kernel" and loaded.params[0].dtype == jnp.int8
    assert loaded.dtype == "bfloat16"


class LlamaWithAdapter(LlamaForCausalLM):
    """Its first parameter is a kernel."""

    def __init__(self, config, *, has_head_kernel, dtype):
        super().__init__(config, has_head_kernel=has_head_kernel, dtype=dtype)
        self.adapter = Linear(2, 2, dtype=dtype)


def test_packages_are_those_of_its_layers_and_of_their_bases(tmp_path, monkeypatch):
    folder = write_random_checkpoint(tmp_path, num_layers=1)
    assert load_model(folder).packages == {"models"}
    monkeypatch.setitem(FAMILIES, "LlamaForCausalLM", f"{__name__}:ForeignLlama")
    assert load_model(folder).packages == {"models", "tests"}


class ForeignLlama(LlamaForCausalLM):
    """As a package of somebody else would define it."""


def _abstract_batch(num_tokens, num_reqs):
    def i32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    return ForwardBatch(
        token_ids=i32(num_tokens),
        positions=i32(num_tokens),
        query_start_loc=i32(num_reqs + 1),
        seq_lens=i32(1, num_reqs),
        block_tables=i32(1, num_reqs, 2),
        logits_indices=i32(num_reqs),
    )
