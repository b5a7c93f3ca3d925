"""MiMo-V2: experts, narrow values, and sinks where the hub has them."""

import jax.numpy as jnp
import pytest
from flax import nnx

from models.decoders.chosen_layer import kind_of
from models.errors import ModelConfigError, UnsupportedModelError
from models.families.mimo_v2 import MiMoV2FlashForCausalLM
from models.layers.routing import SigmoidTopK

HF_CONFIG = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "v_head_dim": 8,
    "sliding_window": 8,
    "max_position_embeddings": 64,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "mlp_layer_types": ["dense"] * 4,
}


# Experts in all layers but the first.
WITH_EXPERTS = {name: value for name, value in HF_CONFIG.items() if name != "mlp_layer_types"} | {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 4,
}


def make_model(hf_config: dict[str, object], dtype: str = "float32") -> MiMoV2FlashForCausalLM:
    config = MiMoV2FlashForCausalLM.read_config(hf_config)
    return nnx.eval_shape(
        lambda: MiMoV2FlashForCausalLM(config, has_head_kernel=True, dtype=jnp.dtype(dtype))
    )


@pytest.fixture(scope="module")
def model() -> MiMoV2FlashForCausalLM:
    return make_model(HF_CONFIG)


def test_layers_of_one_type_may_run_in_a_loop(model):
    kinds = [kind_of(layer) for layer in model.layers]
    assert kinds[0] == kinds[3] != kinds[1] == kinds[2]


def test_sinks_of_sliding_layers_have_the_name_of_the_hub(model):
    rules = model.weight_rules()
    assert [name for name in rules if "sinks" in name] == [
        "layers.1.self_attn.sinks",
        "layers.2.self_attn.sinks",
    ]
    (source,) = rules["layers.2.self_attn.sinks"].sources
    assert source.name == "model.layers.2.self_attn.attention_sink_bias"
    assert rules["layers.2.self_attn.sinks"].axes == ("heads",)


def test_values_and_the_output_are_narrower_than_keys(model):
    rules = model.weight_rules()
    shapes = {
        name: rules[f"layers.1.self_attn.{name}_proj.kernel"].sources[0].shape for name in "qkvo"
    }
    assert shapes == {"q": (48, 16), "k": (48, 16), "v": (32, 16), "o": (16, 32)}


def test_layers_that_predict_further_tokens_may_be_in_a_checkpoint(model):
    assert model.ignores_weight("model.mtp.layers.0.eh_proj.weight")
    assert not model.ignores_weight("model.layers.0.eh_proj.weight")


def test_fields_of_experts_left_out_have_transformers_defaults():
    transformers = pytest.importorskip("transformers")
    theirs = transformers.MiMoV2FlashConfig(num_hidden_layers=4)
    sizes = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
    hf_config = {name: value for name, value in WITH_EXPERTS.items() if name not in sizes}
    config = MiMoV2FlashForCausalLM.read_config(hf_config)
    assert config.num_experts == theirs.n_routed_experts
    assert config.num_experts_per_tok == theirs.num_experts_per_tok
    assert config.moe_intermediate_size == theirs.moe_intermediate_size
    has_experts = tuple(layer_type == "sparse" for layer_type in theirs.mlp_layer_types)
    assert config.has_experts == has_experts
    assert config.routing == SigmoidTopK(
        top_k=theirs.num_experts_per_tok,
        normalizes=theirs.norm_topk_prob,
        factor=theirs.routed_scaling_factor,
        num_groups=theirs.n_group,
        num_kept_groups=theirs.topk_group,
    )


def test_hub_and_transformers_5_spell_the_same_experts():
    of_hub = WITH_EXPERTS | {
        "moe_layer_freq": [0, 0, 1, 1],
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_shared_experts": None,
        "routed_scaling_factor": None,
    }
    of_5 = WITH_EXPERTS | {"mlp_layer_types": ["dense", "dense", "sparse", "sparse"]}
    of_5["num_local_experts"] = of_5.pop("n_routed_experts")
    config = MiMoV2FlashForCausalLM.read_config(of_hub)
    assert config == MiMoV2FlashForCausalLM.read_config(of_5)
    assert config.has_experts == (False, False, True, True)
    assert config.num_experts == 8


def test_routing_is_as_the_fields_say():
    fields = {
        "norm_topk_prob": False,
        "routed_scaling_factor": 2.5,
        "n_group": 4,
        "topk_group": 2,
    }
    config = MiMoV2FlashForCausalLM.read_config(WITH_EXPERTS | fields)
    assert config.routing == SigmoidTopK(
        top_k=2, normalizes=False, factor=2.5, num_groups=4, num_kept_groups=2
    )


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"scoring_func": "softmax"}, UnsupportedModelError, "scoring_func='softmax'"),
        ({"topk_method": "greedy"}, UnsupportedModelError, "topk_method='greedy'"),
        ({"n_shared_experts": 1}, UnsupportedModelError, "n_shared_experts=1"),
        ({"mlp_layer_types": ["sparse"] * 3}, ModelConfigError, "expected a list of 4 names"),
        ({"mlp_layer_types": ["moe"] * 4}, ModelConfigError, "'dense' or 'sparse'"),
        ({"n_group": 3}, ModelConfigError, "n_group=3 and topk_group=1 do not fit"),
        ({"n_group": 8}, ModelConfigError, "two experts"),
        ({"topk_group": 2}, ModelConfigError, "n_group=1 and topk_group=2"),
        (
            {"n_group": 4, "num_experts_per_tok": 3},
            ModelConfigError,
            "kept groups must have at least 3 experts",
        ),
    ],
)
def test_experts_that_are_not_built_are_refused(fields, error, message):
    with pytest.raises(error, match=message):
        MiMoV2FlashForCausalLM.read_config(WITH_EXPERTS | fields)


def test_router_is_float32_in_every_model():
    model = make_model(WITH_EXPERTS, dtype="bfloat16")
    (source,) = model.weight_rules()["layers.1.mlp.gate.correction_bias"].sources
    assert source.name == "model.layers.1.mlp.gate.e_score_correction_bias"
    assert model.layers[1].mlp.gate.correction_bias.get_value().dtype == jnp.float32
    assert model.layers[1].mlp.gate.kernel.get_value().dtype == jnp.float32
    assert model.layers[1].mlp.experts.up_proj.kernel.get_value().dtype == jnp.bfloat16
    assert not hasattr(model.layers[0].mlp, "gate")
