"""Step 3.5's config.json as the hub has it, and its checkpoints."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from models.decoders.chosen_layer import kind_of
from models.errors import ModelConfigError, UnsupportedModelError
from models.families.step3p5 import Step3p5ForCausalLM
from models.registry import read_config
from tests.models.families.read_by_transformers import as_transformers_reads_it

HUB_NAME = {"architectures": ["Step3p5ForCausalLM"]}
FULL, SLIDING = "full_attention", "sliding_attention"
# As on the hub, with four layers and one for multi-token prediction. The limits are smaller, so
# that they clip random numbers.
HUB = {
    **HUB_NAME,
    "model_type": "step3p5",
    "att_impl_type": "GQA",
    "attention_other_setting": {
        "attention_type": SLIDING,
        "num_attention_heads": 8,
        "num_attention_groups": 2,
        "head_dim": 16,
        "true_head_dim": 16,
    },
    "bos_token_id": 0,
    "eos_token_id": [1, 2],
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 96,
    "layer_types": [FULL, SLIDING, SLIDING, FULL, SLIDING],
    "max_position_embeddings": 1024,
    "max_seq_len": 1024,
    "moe_intermediate_size": 32,
    "moe_layers_enum": "1,2,3",
    "moe_num_experts": 8,
    "moe_router_activation": "sigmoid",
    "moe_router_scaling_factor": 3.0,
    "moe_top_k": 2,
    "need_fp32_gate": True,
    "norm_expert_weight": True,
    "num_attention_groups": 2,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0],
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 2.0,
        "original_max_position_embeddings": 512,
        "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
    },
    "rope_theta": [5e6, 1e4, 1e4, 5e6, 1e4],
    "share_expert_dim": 48,
    "sink": False,
    "sliding_window": 16,
    "swiglu_limits": [0.0, 0.0, 0.0, 0.5, 0.0],
    "swiglu_limits_shared": [0.7, 0.0, 0.0, 0.6, 0.0],
    "use_head_wise_attn_gate": True,
    "use_moe": True,
    "use_moe_router_bias": True,
    "use_qk_norm": True,
    "use_rope_layers": [],
    "vocab_size": 768,
    "yarn_only_types": [FULL],
    "zero_centered": True,
}


def without(*names: str) -> dict[str, object]:
    return {name: value for name, value in HUB.items() if name not in names}


@pytest.mark.parametrize(
    "hf_config",
    [
        HUB,
        without("attention_other_setting"),
        HUB | {"num_sliding_attention_heads": 6, "query_pre_attn_scalar": 24},
        HUB | {"attention_bias": True, "per_layer_config": {"00": {"num_attention_heads": 2}}},
        without("swiglu_limits", "swiglu_limits_shared", "rope_scaling", "rope_theta"),
        without("partial_rotary_factors", "moe_layers_enum"),
        without("layer_types", "partial_rotary_factors", "rope_theta", "moe_num_experts"),
        HUB | {"moe_layers_enum": [2], "rope_theta": 5e5, "n_routed_experts": 4},
        HUB | {"mlp_layer_types": ["sparse"] * 4, "tie_word_embeddings": True},
    ],
)
def test_fields_mean_what_they_mean_in_transformers(hf_config):
    wanted = read_config(as_transformers_reads_it(hf_config, "Step3p7TextConfig") | HUB_NAME)
    assert read_config(hf_config) == wanted


def test_fields_by_hand():
    config = read_config(HUB)
    full, sliding = config.attention[:2]
    assert (full.num_q_heads, full.num_kv_heads, full.rotary_dim) == (4, 2, 8)
    assert (full.rope.kind, full.rope.theta, full.sliding_window) == ("llama3", 5e6, None)
    assert (sliding.num_q_heads, sliding.num_kv_heads, sliding.rotary_dim) == (8, 2, 16)
    assert (sliding.rope.kind, sliding.rope.theta, sliding.sliding_window) == ("default", 1e4, 16)
    assert config.has_experts == (False, True, True, True)
    assert (config.num_experts, config.choose.top_k, config.choose.factor) == (8, 2, 3.0)
    assert config.expert_limits == (None, None, None, 0.5)
    assert config.mlp_limits == (0.7, None, None, 0.6)


def test_the_language_model_of_step_3_7_is_the_same():
    whole = {"architectures": ["Step3p7ForConditionalGeneration"], "model_type": "step3p7"}
    config = read_config(whole | {"text_config": HUB})
    assert dataclasses.replace(config, has_other_parts=False) == read_config(HUB)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"moe_router_activation": "softmax"}, UnsupportedModelError, "moe_router_activation="),
        ({"use_head_wise_attn_gate": False}, UnsupportedModelError, "use_head_wise_attn_gate="),
        ({"gating": "per-element"}, UnsupportedModelError, "gating="),
        ({"yarn_only_types": []}, UnsupportedModelError, "yarn_only_types="),
        ({"use_rope_layers": [True] * 4}, UnsupportedModelError, "use_rope_layers="),
        ({"attention_other_setting": {"head_dim": 8}}, UnsupportedModelError, "head_dim=8"),
        ({"attention_other_setting": [8]}, ModelConfigError, "attention_other_setting is"),
        ({"rope_theta": [5e6, 1e4, 1e4, 1e4]}, UnsupportedModelError, "rope_theta has"),
        ({"rope_theta": [5e6, 1e4, 1e4]}, ModelConfigError, "rope_theta is .* list of 4"),
        ({"rope_scaling": "llama3"}, ModelConfigError, "rope_scaling is 'llama3'"),
        ({"rope_scaling": {"type": "proportional"}}, UnsupportedModelError, "proportional"),
        ({"swiglu_limits": [7.0]}, ModelConfigError, "swiglu_limits is .* list of 4"),
        ({"moe_layers_enum": "1,x"}, ModelConfigError, "moe_layers_enum is"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, UnsupportedModelError, "per_layer_config"),
        ({"per_layer_config": {"4": {}}}, ModelConfigError, "per_layer_config has the layers 4"),
        ({"sliding_window": None}, ModelConfigError, "no window is set"),
    ],
)
def test_other_values_are_refused(fields, error, message):
    with pytest.raises(error, match=message):
        read_config(HUB | fields)


def test_only_layers_with_the_same_clipping_are_of_one_kind():
    config = read_config(HUB | {"swiglu_limits": [0.0, 0.0, 0.0, 0.0]})

    def make_model() -> nnx.Module:
        return Step3p5ForCausalLM(config, has_head_kernel=True, dtype=jnp.dtype("float32"))

    kinds = [kind_of(layer) for layer in nnx.eval_shape(make_model).layers]
    assert kinds[1] == kinds[2]
    assert len(set(kinds)) == 3


def test_a_checkpoint_of_text_alone_has_the_logits_of_transformers(tmp_path):
    """With the fields and the names of the hub, and a layer for multi-token prediction."""
    transformers = pytest.importorskip("transformers")
    from tests.end_to_end.forward_check import share_of_bound
    from tests.oracles import families

    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Step3p7Config(
        text_config=without("architectures", "model_type"), vision_config=vision
    )
    whole = transformers.Step3p7ForConditionalGeneration
    model = whole._from_config(config, attn_implementation="eager").float().eval()
    families.seeded(model, 1)
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {
        name: tensor
        for name, tensor in load_file(path).items()
        if not name.startswith(("vision_model.", "vit_large_projector."))
    }
    tensors["model.layers.4.enorm.weight"] = np.ones(64, np.float32)
    save_file(tensors, path)
    (tmp_path / "config.json").write_text(json.dumps(HUB))
    print(f"\n{share_of_bound(model, tmp_path, 'step3.5', 1):8.3f} of bound")
