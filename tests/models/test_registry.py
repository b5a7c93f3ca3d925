"""config.json becomes the config of its family, or an error that says what is wrong."""

import importlib.metadata

import pytest

from models import registry
from models.config.rope_config import RopeConfig
from models.errors import ModelConfigError, ModelError, UnsupportedModelError
from models.families.llama import LlamaForCausalLM
from models.registry import ENTRY_POINT_GROUP, FAMILIES, family_class, read_config

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


def hf_config(architecture: str = "LlamaForCausalLM", **fields: object) -> dict[str, object]:
    """A small config.json; a field given as None is null."""
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "vocab_size": 1000,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
    } | fields


def test_sizes_are_read():
    config = read_config(hf_config(rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2))
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (1000, 256, 512)
    assert config.num_layers == len(config.attention) == 2
    assert [(layer.num_q_heads, layer.num_kv_heads) for layer in config.attention] == [(8, 4)] * 2
    assert (config.rms_norm_eps, config.max_position_embeddings) == (1e-5, 2048)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert config.architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("scaling", "wanted"),
    [
        (None, 2048),
        ({"rope_type": "yarn", "factor": 4.0}, 8192),
        # The length in config.json is the one after scaling.
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}, 1024),
        # 2048 / 49 * 49 is a bit less than 2048 in floating point.
        ({"rope_type": "yarn", "original_max_position_embeddings": 49}, 2048),
        (LLAMA3, 2048),
        ({"rope_type": "dynamic", "factor": 2.0}, 4096),
        ({"type": "linear", "factor": 2.0}, 4096),
    ],
)
def test_positions_reach_as_far_as_the_embedding_is_scaled(scaling, wanted):
    config = read_config(hf_config(rope_scaling=scaling))
    assert config.max_position_embeddings == 2048
    assert config.max_scaled_positions == wanted


def test_missing_fields_mean_what_they_mean_in_transformers():
    fields = hf_config()
    del fields["num_key_value_heads"]
    config = read_config(fields)
    assert config.attention[0].num_kv_heads == 8  # Llama: as many as query heads
    assert config.attention[0].head_dim == 256 // 8
    assert config.rms_norm_eps == 1e-6
    assert config.dtype is None
    assert config.tie_word_embeddings is False
    assert (config.bos_token_id, config.eos_token_ids) == (None, ())


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
def test_null_kv_heads_are_as_many_as_query_heads(architecture):
    config = read_config(hf_config(architecture, num_key_value_heads=None))
    assert config.attention[0].num_kv_heads == 8
    fields = hf_config(architecture, num_attention_heads=64)
    del fields["num_key_value_heads"]
    # Left out, it is 32 in the Qwen2 configuration of transformers.
    left_out = {"LlamaForCausalLM": 64, "Qwen2ForCausalLM": 32}[architecture]
    assert read_config(fields).attention[0].num_kv_heads == left_out


def test_head_dim_may_differ_from_hidden_size_per_head():
    assert read_config(hf_config(head_dim=128)).attention[0].head_dim == 128
    assert read_config(hf_config("Qwen3ForCausalLM")).attention[0].head_dim == 128
    assert read_config(hf_config(head_dim=None)).attention[0].head_dim == 32


# architecture, flags in config.json -> (qkv bias, bias on o, bias in the MLP)
@pytest.mark.parametrize(
    ("architecture", "flags", "expected"),
    [
        ("LlamaForCausalLM", {}, (False, False, False)),
        ("LlamaForCausalLM", {"attention_bias": True}, (True, True, False)),
        ("LlamaForCausalLM", {"mlp_bias": True}, (False, False, True)),
        ("MistralForCausalLM", {"attention_bias": True, "mlp_bias": True}, (False, False, False)),
        ("Qwen2ForCausalLM", {}, (True, False, False)),
    ],
)
def test_biases_follow_the_family(architecture, flags, expected):
    config = read_config(hf_config(architecture, sliding_window=None, **flags))
    for layer in config.attention:
        assert (layer.qkv_bias, layer.out_bias, config.mlp_bias) == expected


def test_biases_of_qwen3_are_where_config_json_asks_for_them():
    for has_bias in (False, True):
        config = read_config(hf_config("Qwen3ForCausalLM", attention_bias=has_bias))
        assert {(a.qkv_bias, a.out_bias) for a in config.attention} == {(has_bias, has_bias)}


@pytest.mark.parametrize("field", ["torch_dtype", "dtype"])
@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        ("bfloat16", "bfloat16"),
        ("torch.bfloat16", "bfloat16"),
        ("half", "float16"),
        ("torch.float", "float32"),
        ("float64", "float32"),
        ("auto", None),
        (None, None),
    ],
)
def test_dtype_is_read_under_both_names(field, value, dtype):
    assert read_config(hf_config(**{field: value})).dtype == dtype


_FIELDS_WITHOUT_DEFAULT = {
    "AXK1ForCausalLM": {"num_key_value_heads": 8},
    "AXK2ForCausalLM": {"num_key_value_heads": 8},
    "BeamForCausalLM": {"n_group": 1, "topk_group": 1},
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 2, "num_key_value_heads": 8},
    "DeepseekV3ForCausalLM": {"num_key_value_heads": 8},
    "DeepseekV32ForCausalLM": {"num_key_value_heads": 8},
    "GlmMoeDsaForCausalLM": {"num_key_value_heads": 8},
    "MistralLarge4ForCausalLM": {"num_key_value_heads": 8},
    "BailingHybridForCausalLM": {"num_key_value_heads": 8, "n_group": 1, "topk_group": 1},
    "KimiLinearForCausalLM": {"num_key_value_heads": 8},
    "Glm4MoeLiteForCausalLM": {"num_key_value_heads": 8},
    "LongcatFlashForCausalLM": {"num_key_value_heads": 8},
    "MiniCPM3ForCausalLM": {"num_key_value_heads": 8},
    "SarvamMLAForCausalLM": {"num_key_value_heads": 8},
    "Mistral4ForCausalLM": {"num_key_value_heads": 8},
    "YoutuForCausalLM": {"num_key_value_heads": 8},
    "Dots1ForCausalLM": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "DoryForCausalLM": {"n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 0},
    "GPTJForCausalLM": {"rotary_dim": 8},
    "OPTForCausalLM": {"ffn_dim": 96},
    "PhimoeForCausalLM": {"lm_head_bias": True},
    "Mamba2ForCausalLM": {"num_heads": 8},
    "Qwen3NextForCausalLM": {"num_experts_per_tok": 2},
    "Qwen4ExpForCausalLM": {
        "indexer_n_heads": 2,
        "indexer_head_dim": 256,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
        "num_experts_per_tok": 2,
    },
}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_integers_written_as_floats_mean_the_same(architecture):
    fields = hf_config(architecture, vocab_size=262_144, num_experts=8, num_kv_shared_layers=0)
    fields |= _FIELDS_WITHOUT_DEFAULT.get(architecture, {})
    floats = {name: float(v) if type(v) is int else v for name, v in fields.items()}
    assert read_config(floats) == read_config(fields)


def test_an_initializer_range_of_zero_is_the_default():
    """Only random weights depend on it."""
    config = read_config(hf_config(initializer_range=0.0))
    assert config.initializer_range == read_config(hf_config()).initializer_range == 0.02


def test_names_of_base_classes_and_older_names_are_read():
    config = read_config(hf_config("Qwen3Model"))
    assert config == read_config(hf_config("Qwen3ForCausalLM"))
    assert read_config(hf_config("LLaMAForCausalLM")).architecture == "LlamaForCausalLM"
    fields = {"rope_pct": 0.5, "norm_eps": 1e-3}
    old = read_config(hf_config("StableLMEpochForCausalLM", **fields))
    assert (old.attention[0].rotary_dim, old.layer_norm_eps) == (16, 1e-3)


def test_several_end_of_sequence_ids_are_kept():
    assert read_config(hf_config(eos_token_id=[7, 9])).eos_token_ids == (7, 9)


@pytest.mark.parametrize(
    ("architecture", "fields", "windows"),
    [
        ("MistralForCausalLM", {"sliding_window": 1024}, [1024, 1024]),
        # 4096 where it is left out.
        ("MistralForCausalLM", {"max_position_embeddings": 32768}, [4096, 4096]),
        ("MistralForCausalLM", {"sliding_window": None}, [None, None]),
        ("Qwen2ForCausalLM", {"use_sliding_window": False, "sliding_window": 1024}, [None, None]),
        # Llama has none, whatever is written.
        ("LlamaForCausalLM", {"sliding_window": 1024}, [None, None]),
        ("Gemma2ForCausalLM", {"sliding_window": 1024}, [1024, None]),
        # As long as the model's whole range: no token feels it.
        ("MistralForCausalLM", {"sliding_window": 2048}, [None, None]),
        ("Gemma2ForCausalLM", {"sliding_window": 2048}, [None, None]),
    ],
)
def test_window_of_each_layer(architecture, fields, windows):
    config = read_config(hf_config(architecture, **fields))
    assert [layer.sliding_window for layer in config.attention] == windows


def test_window_counts_where_scaled_positions_outgrow_it():
    yarn = {"rope_type": "yarn", "factor": 4.0}
    fields = {"sliding_window": 2048, "rope_scaling": yarn}
    config = read_config(hf_config("MistralForCausalLM", **fields))
    assert config.max_scaled_positions == 8192
    assert config.attention[0].sliding_window == 2048


def test_gemma3_as_its_smallest_release_writes_it():
    config = read_config(
        {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "attention_bias": False,
            "attn_logit_softcapping": None,
            "bos_token_id": 2,
            "eos_token_id": [1, 106],
            "final_logit_softcapping": None,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "max_position_embeddings": 32768,
            "num_attention_heads": 4,
            "num_hidden_layers": 26,
            "num_key_value_heads": 1,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06,
            "rope_local_base_freq": 10000,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "torch_dtype": "bfloat16",
            "vocab_size": 262144,
        }
    )
    # Layers 5, 11, 17 and 23 are full.
    layers = config.attention
    full = [idx for idx, layer in enumerate(layers) if layer.sliding_window is None]
    assert full == [5, 11, 17, 23]
    assert (layers[0].sliding_window, layers[0].rope.theta, layers[5].rope.theta) == (512, 1e4, 1e6)
    assert len({layer.rope for layer in layers}) == 2
    assert config.tie_word_embeddings  # its default, which the release leaves out
    assert layers[0].scale == 1 / 16
    assert config.embedding_scale == 1152**0.5
    assert config.hidden_act == "gelu_pytorch_tanh"
    assert (layers[0].soft_cap, config.logits_soft_cap) == (None, None)


def test_gemma2_caps_and_scale_where_they_are_left_out_and_where_they_are_null():
    config = read_config(hf_config("Gemma2ForCausalLM", head_dim=32))
    layer = config.attention[0]
    assert (layer.soft_cap, config.logits_soft_cap) == (50.0, 30.0)
    assert layer.scale == 256**-0.5  # not head_dim's
    assert len({layer.rope for layer in config.attention}) == 1
    nulls = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    config = read_config(hf_config("Gemma2ForCausalLM", **nulls))
    assert (config.attention[0].soft_cap, config.logits_soft_cap) == (None, None)


@pytest.mark.parametrize("architecture", [f"Gemma{number}ForCausalLM" for number in (2, 3, 4)])
def test_special_tokens_of_gemma_where_they_are_left_out(architecture):
    fields = hf_config(architecture, vocab_size_per_layer_input=1000)
    config = read_config(fields)
    assert (config.bos_token_id, config.eos_token_ids) == (2, (1,))
    assert read_config(fields | {"eos_token_id": None}).eos_token_ids == ()


def test_other_families_have_no_caps_and_their_own_scale():
    fields = {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 64, "head_dim": 16}
    layer = read_config(hf_config(**fields)).attention[0]
    assert (layer.soft_cap, layer.scale) == (None, 0.25)


def test_stablelm_where_fields_are_left_out():
    fields = hf_config("StableLmForCausalLM", num_attention_heads=32)
    del fields["num_key_value_heads"]
    config = read_config(fields)
    layer = config.attention[0]
    assert (layer.num_kv_heads, layer.head_dim, layer.rotary_dim) == (32, 8, 2)
    assert (layer.qkv_bias, layer.out_bias) == (False, False)
    assert (config.has_head_norms, config.has_parallel_residual) == (False, False)
    assert (config.layer_norm_eps, config.hidden_act) == (1e-5, "silu")
    assert (config.bos_token_id, config.eos_token_ids) == (0, (0,))
    assert read_config(fields | {"eos_token_id": None}).eos_token_ids == ()


def test_stablelm_as_its_releases_differ():
    config = read_config(
        hf_config(
            "StableLmForCausalLM",
            layer_norm_eps=1e-6,
            partial_rotary_factor=0.5,
            qk_layernorm=True,
            use_parallel_residual=True,
            use_qkv_bias=True,
        )
    )
    layer = config.attention[0]
    assert layer.rotary == (layer.rope, 16)
    assert (layer.qkv_bias, layer.out_bias) == (True, False)
    assert (config.has_head_norms, config.has_parallel_residual) == (True, True)
    assert config.layer_norm_eps == 1e-6


_PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("architecture", "ropes"),
    [
        ("StableLmForCausalLM", _PROPORTIONAL),
        (
            "LagunaForCausalLM",
            {"full_attention": {"rope_theta": 1e4}, "sliding_attention": _PROPORTIONAL},
        ),
    ],
)
def test_heads_with_turned_leading_dimensions_refuse_proportional_embeddings(architecture, ropes):
    with pytest.raises(
        UnsupportedModelError, match=f"'proportional' is not supported for {architecture}"
    ):
        read_config(hf_config(architecture, rope_parameters=ropes))


def test_heads_of_stablelm_fill_the_hidden_size():
    with pytest.raises(ModelConfigError, match="7 heads of 36 dimensions do not fill"):
        read_config(hf_config("StableLmForCausalLM", num_attention_heads=7, num_key_value_heads=7))


GEMMA4_ROPES = {
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.5,
        "rope_theta": 5e5,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
}


def gemma4_config(**fields: object) -> dict[str, object]:
    """Seven layers, which are sliding except the sixth and the last."""
    sizes = {"num_hidden_layers": 7, "vocab_size_per_layer_input": 1000}
    return hf_config("Gemma4ForCausalLM", **sizes | fields)


def test_gemma4_where_fields_are_left_out():
    config = read_config(gemma4_config(num_key_value_heads=None))
    layers = config.attention
    # The last layer is full although its place in the pattern is a sliding one.
    full = [idx for idx, layer in enumerate(layers) if layer.sliding_window is None]
    assert full == [5, 6]
    assert [layer.head_dim for layer in layers] == [256] * 5 + [512] * 2
    assert {layer.sliding_window for layer in layers} == {512, None}
    assert {(layer.scale, layer.soft_cap, layer.kv_layer_idx) for layer in layers} == {
        (1.0, None, None)
    }
    assert layers[0].rope == RopeConfig(theta=1e4)
    assert layers[5].rope == RopeConfig(kind="proportional", theta=1e6, turned_share=0.25)
    assert (config.per_layer_size, config.has_double_wide_mlp) == (256, False)
    assert (config.logits_soft_cap, config.tie_word_embeddings) == (None, True)


def test_gemma4_in_the_spelling_before_and_after_configs_of_layers():
    fields = {"head_dim": 16, "attention_k_eq_v": True, "rope_parameters": GEMMA4_ROPES}
    before = read_config(gemma4_config(**fields, global_head_dim=32, num_global_key_value_heads=2))
    own = {"head_dim": 32, "num_key_value_heads": 2}
    after = read_config(gemma4_config(**fields, per_layer_config={"5": own, "6": own}))
    assert before.attention == after.attention
    sizes = [(layer.head_dim, layer.num_kv_heads) for layer in after.attention]
    assert sizes == [(16, 4)] * 5 + [(32, 2)] * 2
    assert [layer.keys_are_values for layer in after.attention] == [False] * 5 + [True] * 2
    assert {layer.rope.theta for layer in after.attention} == {2e4, 5e5}
    # The number of KV heads counts only where keys are values.
    other = fields | {"attention_k_eq_v": False, "num_global_key_value_heads": 2}
    assert read_config(gemma4_config(**other)).attention[5].num_kv_heads == 4


def test_gemma4_numbers_of_layers_may_begin_with_zeros():
    """transformers 5.24 writes "05" and "11" for a model of twelve layers."""
    own = {"head_dim": 32}
    config = read_config(
        gemma4_config(num_hidden_layers=12, per_layer_config={"05": own, "11": own})
    )
    assert [layer.head_dim for layer in config.attention] == ([256] * 5 + [32]) * 2


def test_gemma4_layers_share_with_the_last_one_of_their_type_that_does_not():
    types = ["sliding_attention", "sliding_attention", "full_attention"] * 3
    sizes = {"num_hidden_layers": 9, "layer_types": types, "num_kv_shared_layers": 4}
    config = read_config(gemma4_config(**sizes))
    # Layers 5 to 8 share.
    assert [layer.kv_layer_idx for layer in config.attention] == [None] * 5 + [2, 4, 4, 2]


@pytest.mark.parametrize("num_shared", [6, 7, 8])
def test_gemma4_needs_a_layer_of_each_type_to_share_with(num_shared):
    with pytest.raises(ModelConfigError, match=f"num_kv_shared_layers={num_shared} of 7 leaves no"):
        read_config(gemma4_config(num_kv_shared_layers=num_shared))


def test_masks_of_images_make_no_difference_to_gemma4_and_other_masks_are_refused():
    masked = gemma4_config(use_bidirectional_attention="vision")
    assert read_config(masked) == read_config(gemma4_config())
    with pytest.raises(UnsupportedModelError, match="use_bidirectional_attention is set"):
        read_config(gemma4_config(use_bidirectional_attention="all"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size_per_layer_input": 999}, "vocab_size_per_layer_input=999 is less than"),
        ({"per_layer_config": [1]}, r"per_layer_config is \[1\]; expected an object"),
        ({"per_layer_config": {"5": 7}}, "per_layer_config of layer 5 is 7; expected an object"),
        (
            {"per_layer_config": {"5": {"head_dim": 0}}},
            "head_dim is 0; expected a positive integer",
        ),
        ({"per_layer_config": {"7": {}, "x": {}}}, "layers 7, x; expected numbers from 0 to 6"),
        ({"per_layer_config": {"5": {}, "05": {}}}, "layers 5, 05; expected every layer at most"),
        ({"global_head_dim": "16"}, "global_head_dim is '16'"),
        (
            {"attention_k_eq_v": True, "num_global_key_value_heads": "2"},
            "num_global_key_value_heads is '2'",
        ),
        (
            {"attention_k_eq_v": True, "num_global_key_value_heads": 3},
            "Layer 5 has sizes of its own: .* num_global_key_value_heads",
        ),
        ({"rope_parameters": {}}, "rope_parameters has no rope_theta for full_attention"),
        (
            {"rope_parameters": {"full_attention": GEMMA4_ROPES["full_attention"]}},
            "rope_parameters has no rope_theta for sliding_attention",
        ),
    ],
)
def test_malformed_field_of_gemma4_is_named(fields, message):
    with pytest.raises(ModelConfigError, match=message):
        read_config(gemma4_config(**fields))


def test_layers_of_gemma4_differ_in_known_fields_alone():
    own = {"5": {"head_dim": 16, "sliding_window": 4}}
    with pytest.raises(UnsupportedModelError, match="layer 5 has sliding_window; paxkv supports"):
        read_config(gemma4_config(per_layer_config=own))


def mimo_config(**fields: object) -> dict[str, object]:
    """Seven layers, of which the first and the sixth are full."""
    dense = {"num_hidden_layers": 7, "mlp_layer_types": ["dense"] * 7}
    return hf_config("MiMoV2FlashForCausalLM", **dense | fields)


def test_mimo_where_fields_are_left_out():
    config = read_config(mimo_config(num_key_value_heads=2))
    layers = config.attention
    full = [idx for idx, layer in enumerate(layers) if layer.sliding_window is None]
    assert full == [0, 5]
    assert [layer.has_sinks for layer in layers] == [idx not in full for idx in range(7)]
    assert {(layer.head_dim, layer.v_head_dim) for layer in layers} == {(192, 128)}
    assert [layers[idx].num_kv_heads for idx in (0, 1)] == [2, 4]
    # A third of 192 dimensions, rounded down.
    assert [layers[idx].rotary for idx in (0, 1)] == [
        (RopeConfig(theta=5e6), 64),
        (RopeConfig(theta=1e4), 64),
    ]
    assert layers[1].sliding_window == 129
    assert (config.value_scale, config.rms_norm_eps) == (0.707, 1e-5)


def test_mimo_as_other_fields_say():
    ropes = {
        "full_attention": {"rope_theta": 3e6, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_theta": 2e4, "partial_rotary_factor": 0.25},
    }
    config = read_config(
        mimo_config(
            head_dim=24,
            num_key_value_heads=2,
            sliding_window_size=128,
            sliding_window=64,
            attention_value_scale=None,
            attention_bias=True,
            rope_parameters=ropes,
        )
    )
    full, sliding = config.attention[:2]
    assert (full.rotary_dim, sliding.rotary_dim) == (12, 6)
    assert (full.rope.theta, sliding.rope.theta) == (3e6, 2e4)
    # The size is without the token itself, and wins.
    assert sliding.sliding_window == 129
    assert config.value_scale == 1.0
    assert (full.qkv_bias, full.out_bias) == (True, False)


# As the hub spells them; the first, third and last layers are full.
MIMO_HUB = {
    "num_key_value_heads": 2,
    "hybrid_layer_pattern": [0, 1, 0, 1, 1, 1, 0],
    "mlp_layer_types": None,
    "moe_layer_freq": [0] * 7,
    "layernorm_epsilon": 1e-4,
    "rope_theta": 3e6,
    "swa_rope_theta": 2e4,
    "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
}


def test_mimo_in_the_spelling_of_the_hub():
    config = read_config(mimo_config(**MIMO_HUB))
    layers = config.attention
    full = [idx for idx, layer in enumerate(layers) if layer.sliding_window is None]
    assert full == [0, 2, 6]
    assert (layers[0].rope.theta, layers[1].rope.theta) == (3e6, 2e4)
    assert config.rms_norm_eps == 1e-4
    # The names of transformers win.
    theirs = {
        "layer_types": ["full_attention"] * 7,
        "mlp_layer_types": ["dense"] * 7,
        "moe_layer_freq": [1] * 7,
        "rms_norm_eps": 1e-3,
        "rope_parameters": {"full_attention": {"rope_theta": 4e6}},
    }
    config = read_config(mimo_config(**MIMO_HUB | theirs))
    assert {(layer.sliding_window, layer.rope.theta) for layer in config.attention} == {(None, 4e6)}
    assert config.rms_norm_eps == 1e-3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("swa_num_attention_heads", 16),
        ("swa_num_key_value_heads", 2),
        ("swa_head_dim", 128),
        ("swa_v_head_dim", 192),
        ("add_swa_attention_sink_bias", False),
        ("add_full_attention_sink_bias", True),
    ],
)
def test_fields_of_the_hub_that_contradict_the_layers_of_mimo_are_refused(name, value):
    with pytest.raises(UnsupportedModelError, match=f"{name} is {value}"):
        read_config(mimo_config(**MIMO_HUB | {name: value}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sliding_window": None}, "sliding_window is missing"),
        ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
        ({"num_key_value_heads": 8}, "not a multiple of 16.*num_key_value_heads=8"),
        (
            {"hybrid_layer_pattern": [0, 1]},
            r"hybrid_layer_pattern is \[0, 1\]; expected a list of 7",
        ),
        ({"hybrid_layer_pattern": [2] * 7}, "hybrid_layer_pattern is .*, 0 or 1"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            "rope_parameters has no rope_theta for sliding_attention",
        ),
    ],
)
def test_malformed_field_of_mimo_is_named(fields, message):
    with pytest.raises(ModelConfigError, match=message):
        read_config(mimo_config(**{"num_key_value_heads": 2} | fields))


def test_mimo_turns_a_part_of_each_head_in_the_plain_way_alone():
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}
    ropes = {"full_attention": linear, "sliding_attention": {"rope_theta": 1e4}}
    with pytest.raises(UnsupportedModelError, match="rope type 'linear' is not supported for MiMo"):
        read_config(mimo_config(num_key_value_heads=2, rope_parameters=ropes))


def test_positions_reach_as_far_as_the_least_scaled_layer():
    # The published length of Gemma 3 is the one after its global embedding is scaled.
    linear = {"rope_type": "linear", "factor": 8.0}
    config = read_config(hf_config("Gemma3ForCausalLM", rope_scaling=linear, num_hidden_layers=6))
    assert {layer.rope.factor for layer in config.attention} == {8.0, 1.0}
    assert config.max_scaled_positions == 2048


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_architecture_has_a_class_of_its_name(architecture):
    assert family_class(architecture).__name__ == architecture


@pytest.mark.parametrize(
    ("model_type", "wanted"),
    [
        ("exaone", "ExaoneForCausalLM"),
        ("internlm3", "InternLM3ForCausalLM"),
        ("iquestcoder", "IQuestCoderForCausalLM"),
        ("llama", "LlamaForCausalLM"),
    ],
)
def test_model_type_distinguishes_families_that_are_saved_as_llama(model_type, wanted):
    config = read_config(hf_config(model_type=model_type))
    assert (config.architecture, config.model_type) == (wanted, model_type)


@pytest.fixture
def reads_entry_points():
    """Forgets installed packages before and after the test."""
    registry._entry_points.cache_clear()
    yield
    registry._entry_points.cache_clear()


@pytest.mark.usefixtures("reads_entry_points")
def test_installed_packages_add_families_and_replace_none(monkeypatch):
    own = "tests.models.test_registry:ForeignModel"
    added = [
        importlib.metadata.EntryPoint(name, own, ENTRY_POINT_GROUP)
        for name in ("ForeignForCausalLM", "LlamaForCausalLM")
    ]
    found = {ENTRY_POINT_GROUP: added}
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: found[group])
    assert family_class("ForeignForCausalLM") is ForeignModel
    assert family_class("LlamaForCausalLM") is LlamaForCausalLM
    config = read_config(hf_config("ForeignForCausalLM"))
    assert config.architecture == "ForeignForCausalLM"
    with pytest.raises(UnsupportedModelError, match="similar names: ForeignForCausalLM. docs"):
        read_config(hf_config("ForeignerModel", model_type="x"))


@pytest.mark.usefixtures("reads_entry_points")
@pytest.mark.parametrize("value", ["no_such_package:Model", "models.registry:NoSuchModel"])
def test_a_family_that_cannot_be_imported_is_named(monkeypatch, value):
    added = [importlib.metadata.EntryPoint("ForeignForCausalLM", value, ENTRY_POINT_GROUP)]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: added)
    with pytest.raises(UnsupportedModelError, match=f"{value}.* cannot be imported"):
        read_config(hf_config("ForeignForCausalLM"))


class ForeignModel(LlamaForCausalLM):
    """As a package of somebody else would define it."""


@pytest.mark.parametrize(
    ("architecture", "model_type", "hint"),
    [
        ("BertModel", "bert", ""),
        (
            "Glm3ForCausalLM",
            "glm3",
            "Supported architectures with similar names: GlmForCausalLM, Lfm3ForCausalLM, "
            "Glm4ForCausalLM. ",
        ),
    ],
)
def test_unknown_architecture_is_refused_and_similar_ones_are_named(architecture, model_type, hint):
    with pytest.raises(UnsupportedModelError) as error:
        read_config(hf_config(architecture, model_type=model_type))
    assert str(error.value) == (
        f"config.json: architecture '{architecture}' is not supported. {hint}docs/guide/models.md "
        f"lists all {len(FAMILIES)} that are supported; docs/guide/adding-a-model.md describes how "
        "to add one."
    )


@pytest.mark.parametrize("fields", [{"architectures": None}, {"architectures": ["BertModel"]}])
def test_no_message_lists_all_architectures(fields):
    with pytest.raises(ModelError) as error:
        read_config(hf_config(**{"model_type": "bert"} | fields))
    assert len(str(error.value)) < 300
    assert "docs/guide/models.md lists" in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "relu6"}, "hidden_act='relu6'"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"per_layer_config": {"1": {"head_dim": 64}}}, "per_layer_config is set"),
        (
            {"architectures": ["Gemma4ForCausalLM"], "enable_moe_block": True},
            "enable_moe_block is set, and hidden_size_per_layer_input is 256; Gemma4ForCausalLM",
        ),
    ],
)
def test_what_is_not_built_is_refused(fields, message):
    with pytest.raises(UnsupportedModelError, match=message):
        read_config(hf_config(**fields))


@pytest.mark.parametrize("architecture", ["Gemma3ForCausalLM", "Gemma4ForCausalLM"])
def test_attention_caps_of_later_gemmas_are_refused(architecture):
    fields = {"attn_logit_softcapping": 50.0, "vocab_size_per_layer_input": 1000}
    with pytest.raises(UnsupportedModelError, match="attn_logit_softcapping=50"):
        read_config(hf_config(architecture, **fields))


def test_multimodal_configs_are_refused():
    with pytest.raises(UnsupportedModelError, match="multimodal model, whose text part is not"):
        read_config({"architectures": ["Gemma4ForCausalLM"], "text_config": {"vocab_size": 8}})
    with pytest.raises(UnsupportedModelError, match="the language model is loaded only for"):
        read_config(hf_config("PaliGemmaForConditionalGeneration"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"hidden_size": "256"}, "hidden_size is '256'; expected a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads=3"),
        ({"head_dim": 33}, "head_dim=33 is odd"),
        ({"architectures": [], "model_type": None}, r"architectures is \[\]; expected a list"),
        ({"architectures": None, "model_type": "bert"}, "architectures is missing"),
        ({"tie_word_embeddings": "yes"}, "expected true or false"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id"),
    ],
)
def test_malformed_field_is_named(fields, message):
    with pytest.raises(ModelConfigError, match=message):
        read_config(hf_config(**fields))
