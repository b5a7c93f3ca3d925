"""Qwen4-Exp: when there is no index, which layers are of one kind, and what is refused."""

import re

import jax
import jax.numpy as jnp
import pytest

from models.decoders.chosen_layer import kind_of
from models.errors import ModelConfigError, UnsupportedModelError
from models.families.qwen4_exp import Qwen4ExpForCausalLM
from models.forward.carry import Carry
from models.registry import read_config

FIELDS = {
    "architectures": ["Qwen4ExpForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "hc_count": 3,
    "hc_lowrank": 4,
    "indexer_n_heads": 2,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}


def make_model(config) -> Qwen4ExpForCausalLM:
    return jax.eval_shape(
        lambda: Qwen4ExpForCausalLM(config, has_head_kernel=True, dtype=jnp.dtype("float32"))
    )


# A request of 20 tokens has five blocks of 4, of which four are chosen.
@pytest.mark.parametrize(("max_model_len", "has_index"), [(19, False), (20, True)])
def test_there_is_an_index_if_a_request_can_have_more_blocks_than_are_chosen(
    max_model_len, has_index
):
    config = read_config(FIELDS).for_length(max_model_len)
    caches = [set(dict(layer.caches)) for layer in config.spec("float32").layers]
    index = {"self_attn.indexer"} if has_index else set()
    assert caches == [{"linear_attn"}, {"self_attn", *index}] * 2
    model = make_model(config)
    assert (model.layers[1].self_attn.indexer is not None) == has_index
    name = "model.layers.1.self_attn.indexer.q_layernorm.weight"
    assert model.ignores_weight(name) != has_index


def test_layers_that_differ_in_weights_alone_are_of_one_kind():
    layers = make_model(read_config(FIELDS)).layers
    kinds = list(map(kind_of, layers))
    assert kinds[:2] == kinds[2:] and kinds[0] != kinds[1]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"indexer_budget": 18},
            ModelConfigError,
            "18; expected a multiple of indexer_compress_ratio",
        ),
        ({"indexer_budget": None}, ModelConfigError, "indexer_budget is missing"),
        ({"indexer_head_dim": 8}, ModelConfigError, "indexer_head_dim is 8; expected at least 16"),
        ({"indexer_kv_heads": 2}, UnsupportedModelError, "indexer_kv_heads=2 is not supported"),
        ({"output_gate_type": "relu"}, UnsupportedModelError, "output_gate_type is 'relu'"),
        ({"hc_count": 1}, ModelConfigError, "hc_count is 1; expected an integer of at least 2"),
    ],
)
def test_fields_that_do_not_fit_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        read_config(FIELDS | changes)


def test_draft_heads_cannot_read_several_streams():
    model = make_model(read_config(FIELDS))
    with pytest.raises(UnsupportedModelError, match=re.escape("has 3 residual streams; draft")):
        model.tap(Carry(hidden=jnp.zeros((1, 3, 32))))
