"""The config.json of DeepSeek V3, V2 and their like, and the names of their weights."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.decoders.chosen_layer import kind_of
from models.errors import ModelConfigError, UnsupportedModelError
from models.families.deepseek_v3 import DeepseekV3ForCausalLM
from models.registry import read_config
from tests.models.families.read_by_transformers import as_transformers_reads_it

SIZES = {
    "vocab_size": 16,
    "hidden_size": 64,
    "intermediate_size": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 256,
    "num_experts_per_tok": 2,
}
V3 = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", **SIZES}
V2 = {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", **SIZES}
SARVAM = {"architectures": ["SarvamMLAForCausalLM"], "model_type": "sarvam_mla", **SIZES}
GLM = {"architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", **SIZES}
AXK1 = {"architectures": ["AXK1ForCausalLM"], "model_type": "axk1", **SIZES}
MIXED = ["sparse", "dense", "sparse", "dense", "sparse"]
# As DeepSeek writes it on the hub.
YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}


@pytest.mark.parametrize(
    ("hf_config", "config_class"),
    [
        (V3 | {"rope_scaling": YARN, "num_nextn_predict_layers": 2}, "DeepseekV3Config"),
        (V3 | {"q_lora_rank": None, "n_group": 2, "topk_group": 1}, "DeepseekV3Config"),
        (V3 | {"attention_bias": True, "rope_interleave": False}, "DeepseekV3Config"),
        (V2 | {"q_lora_rank": None, "rope_scaling": YARN}, "DeepseekV2Config"),
        (
            V2 | {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3},
            "DeepseekV2Config",
        ),
        (SARVAM | {"num_experts": 8, "num_shared_experts": 2, "head_dim": 576}, "SarvamMLAConfig"),
        (SARVAM | {"num_local_experts": 8}, "SarvamMLAConfig"),
        (SARVAM | {"rope_scaling": YARN | {"type": "deepseek_yarn"}}, "SarvamMLAConfig"),
        (GLM | {"mlp_layer_types": MIXED, "num_local_experts": 8}, "Glm4MoeLiteConfig"),
        (GLM | {"rope_scaling": YARN, "q_lora_rank": None}, "Glm4MoeLiteConfig"),
        (AXK1 | {"mlp_layer_types": MIXED, "topk_method": "greedy"}, "AXK1Config"),
        (AXK1 | {"first_k_dense_replace": 2, "n_group": 1, "topk_group": 1}, "AXK1Config"),
        (AXK1 | {"rope_scaling": YARN, "rope_interleave": False}, "AXK1Config"),
    ],
)
def test_fields_mean_what_they_mean_in_transformers(hf_config, config_class):
    hf_config = {"rope_theta": 10000, **hf_config}
    wanted = read_config(as_transformers_reads_it(hf_config, config_class))
    assert read_config(hf_config) == wanted


def test_sizes_by_hand():
    (layer, *_) = read_config(V3).attention
    assert (layer.q_latent_dim, layer.latent_dim) == (1536, 512)
    assert (layer.nope_dim, layer.rotary_dim, layer.head_dim) == (128, 64, 192)
    assert (layer.value_head_dim, layer.scale) == (128, 192**-0.5)
    assert read_config(V3 | {"q_lora_rank": None}).attention[0].q_latent_dim is None


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [({}, True), ({"rope_interleave": False}, False), ({"rope_interleave": None}, False)],
)
def test_pairs_that_are_turned(fields, wanted):
    assert read_config(V3 | fields).attention[0].turns_neighbors == wanted


def test_layers_with_experts_by_hand():
    for hf_config in (GLM, AXK1):
        assert read_config(hf_config).has_experts == (False, True, True, True, True)
        mixed = read_config(hf_config | {"mlp_layer_types": MIXED})
        assert mixed.has_experts == (True, False, True, False, True)
    assert read_config(GLM).num_experts == 64
    assert read_config(AXK1 | {"num_local_experts": 16}).num_experts == 16


def test_logits_have_the_factor_of_yarn():
    factor = (0.1 * 0.707 * math.log(40) + 1) ** 2
    (layer, *_) = read_config(V2 | {"rope_scaling": YARN}).attention
    assert layer.scale == pytest.approx(192**-0.5 * factor, rel=1e-12)


LONGROPE = {"type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32}


@pytest.mark.parametrize("rope_scaling", [{"type": "linear"}, LONGROPE])
def test_logits_have_this_factor_for_every_scaled_embedding(rope_scaling):
    rope_scaling = {**rope_scaling, "factor": 4.0, "mscale_all_dim": 1.0}
    (layer, *_) = read_config(V3 | {"rope_scaling": rope_scaling}).attention
    assert layer.scale == pytest.approx(192**-0.5 * (0.1 * math.log(4) + 1) ** 2, rel=1e-12)
    unscaled = {"rope_scaling": {"type": "default", "factor": 4.0, "mscale_all_dim": 1.0}}
    assert read_config(V3 | unscaled).attention[0].scale == 192**-0.5


def test_a_longrope_with_mscale_needs_its_factor():
    with pytest.raises(ModelConfigError, match="factor is missing"):
        read_config(V3 | {"rope_scaling": LONGROPE | {"mscale_all_dim": 1.0}})


@pytest.mark.parametrize(
    ("hf_config", "message"),
    [
        (V3 | {"num_key_value_heads": 4}, "num_key_value_heads=4 with num_attention_heads=8"),
        (V3 | {"topk_method": "greedy"}, "topk_method='greedy' is not supported"),
        (V3 | {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
        (V2 | {"topk_method": "noaux_tc"}, "topk_method='noaux_tc' is not supported"),
        (V2 | {"norm_topk_prob": True}, "norm_topk_prob=True is not supported"),
        (V2 | {"mlp_bias": True}, "mlp_bias=True is not supported"),
    ],
)
def test_other_models_are_refused(hf_config, message):
    with pytest.raises(UnsupportedModelError, match=message):
        read_config(hf_config)


def test_groups_that_do_not_fit_are_named():
    with pytest.raises(ModelConfigError, match="n_group=3 and topk_group=4 do not fit 256"):
        read_config(V3 | {"n_group": 3})


def make_model() -> DeepseekV3ForCausalLM:
    small = {"n_routed_experts": 16, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3}
    config = read_config(V3 | small | {"kv_lora_rank": 6})
    return nnx.eval_shape(
        lambda: DeepseekV3ForCausalLM(config, has_head_kernel=True, dtype=jnp.dtype("float32"))
    )


def test_layers_with_experts_are_of_one_kind():
    layers = make_model().layers
    assert kind_of(layers[0]) == kind_of(layers[2]) != kind_of(layers[3])
    assert kind_of(layers[3]) == kind_of(layers[4])


def test_absorbed_matrices_are_the_halves_of_each_head_of_kv_b_proj():
    rules = make_model().weight_rules()
    stored = np.arange(8 * 7 * 6).reshape(8 * 7, 6)
    by_head = stored.reshape(8, 7, 6)
    prefix = "layers.1.self_attn"
    k_up, v_up = (rules[f"{prefix}.{name}.kernel"] for name in ("k_up", "v_up"))
    for rule in (k_up, v_up):
        (source,) = rule.sources
        assert (source.name, source.shape) == (f"model.{prefix}.kv_b_proj.weight", stored.shape)
        assert rule.axes == ("heads", None, None)
    # The loader swaps the last two axes: [heads, 4, 6] from queries, [heads, 6, 3] to values.
    np.testing.assert_array_equal(k_up.combined([stored]).swapaxes(1, 2), by_head[:, :4])
    np.testing.assert_array_equal(v_up.combined([stored]), by_head[:, 4:])


def test_weights_of_prediction_layers_are_not_loaded():
    model = make_model()
    assert model.ignores_weight("model.layers.5.eh_proj.weight")
    assert not model.ignores_weight("model.layers.4.self_attn.o_proj.weight")
