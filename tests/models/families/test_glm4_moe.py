"""GLM-4.5's config.json, and the names of its weights."""

import jax.numpy as jnp
import pytest
from flax import nnx

from models.decoders.chosen_layer import kind_of
from models.errors import ModelConfigError, UnsupportedModelError
from models.families.glm4_moe import Glm4MoeForCausalLM
from models.layers.routing import SigmoidTopK
from models.registry import read_config
from tests.models.families.read_by_transformers import as_transformers_reads_it

HF_CONFIG = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "vocab_size": 16,
    "hidden_size": 64,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
        {"num_local_experts": 8, "n_shared_experts": 2, "moe_intermediate_size": 8},
        {"attention_bias": True, "use_qk_norm": True, "head_dim": 32, "num_key_value_heads": 4},
        {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "first_k_dense_replace": 2},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}},
        {"norm_topk_prob": False, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 0},
        {"num_mtp_layers": 2, "first_k_dense_replace": 0, "rms_norm_eps": 1e-6},
    ],
)
def test_fields_mean_what_they_mean_in_transformers(fields):
    hf_config = HF_CONFIG | fields
    wanted = read_config(as_transformers_reads_it(hf_config, "Glm4MoeConfig"))
    assert read_config(hf_config) == wanted


def test_defaults_by_hand():
    config = read_config(HF_CONFIG)
    assert (config.num_experts, config.moe_intermediate_size) == (128, 1408)
    assert config.choose == SigmoidTopK(top_k=8)
    assert (config.has_experts, config.shared_intermediate_size) == ((False, True, True), 1408)
    assert (config.has_head_norms, config.num_mtp_layers) == (False, 1)
    layer = config.attention[0]
    assert (layer.num_kv_heads, layer.head_dim, layer.rotary_dim) == (8, 8, 4)
    assert (layer.qkv_bias, layer.out_bias) == (False, False)


@pytest.mark.parametrize("field", ["scoring_func", "topk_method"])
def test_other_routers_are_refused(field):
    with pytest.raises(UnsupportedModelError, match=f"{field}='softmax' is not supported"):
        read_config(HF_CONFIG | {field: "softmax"})


def test_groups_that_do_not_fit_are_named():
    with pytest.raises(ModelConfigError, match="n_group=3 and topk_group=1 do not fit 128"):
        read_config(HF_CONFIG | {"n_group": 3})


def make_model(**fields: object) -> Glm4MoeForCausalLM:
    config = read_config(HF_CONFIG | {"n_routed_experts": 8} | fields)
    return nnx.eval_shape(
        lambda: Glm4MoeForCausalLM(config, has_head_kernel=True, dtype=jnp.dtype("bfloat16"))
    )


def test_layers_with_experts_are_of_one_kind():
    first, second, third = make_model().layers
    assert kind_of(second) == kind_of(third) != kind_of(first)


def test_the_router_and_its_correction_stay_float32_under_the_names_of_the_hub():
    model = make_model()
    gate = model.layers[1].mlp.gate
    assert gate.kernel.get_value().dtype == jnp.float32
    assert gate.correction_bias.get_value().dtype == jnp.float32
    rules = model.weight_rules()
    (correction,) = rules["layers.1.mlp.gate.correction_bias"].sources
    assert correction.name == "model.layers.1.mlp.gate.e_score_correction_bias"
    assert correction.shape == (8,)
    (up,) = rules["layers.1.mlp.shared_experts.up_proj.kernel"].sources
    assert (up.name, up.shape) == ("model.layers.1.mlp.shared_experts.up_proj.weight", (1408, 64))


def test_layers_that_predict_further_tokens_are_ignored():
    # Of the hub: one layer after the last.
    model = make_model()
    assert model.ignores_weight("model.layers.3.eh_proj.weight")
    assert not model.ignores_weight("model.layers.2.eh_proj.weight")
    assert not model.ignores_weight("model.layers.30.eh_proj.weight")
    assert not make_model(num_nextn_predict_layers=0).ignores_weight("model.layers.3.norm.weight")
