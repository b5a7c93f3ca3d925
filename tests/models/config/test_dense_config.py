"""config.json of dense families: fields left out, fields set, and fields that are refused."""

import jax.numpy as jnp
import pytest
from flax import nnx

from models.config.dense_config import DenseConfig, LayerNormConfig
from models.config.rope_config import RopeConfig
from models.decoders.chosen_layer import kind_of
from models.errors import ModelConfigError, UnsupportedModelError
from models.layers.attention_variants import ClippedAttention, QueryScale, ScaledQueriesAttention
from models.registry import family_class, read_config
from tests.models.families.read_by_transformers import as_transformers_reads_it

SIZES = {
    "vocab_size": 400,
    "hidden_size": 64,
    "intermediate_size": 16,
    "num_hidden_layers": 8,
    "num_attention_heads": 40,
    "max_position_embeddings": 8192,
    "head_dim": 4,
}
LISTS_BY_LAYER = ("layer_types", "layer_rope_theta")
# Architecture -> its configuration class in transformers, and fields that differ from `SIZES`.
FAMILIES = {
    "ApertusForCausalLM": ("ApertusConfig", {}),
    "ArceeForCausalLM": ("ArceeConfig", {"hidden_size": 80}),
    "CohereForCausalLM": ("CohereConfig", {}),
    "Cohere2ForCausalLM": ("Cohere2Config", {"hidden_size": 160}),
    "BambaForCausalLM": ("BambaConfig", {"hidden_size": 80, "mamba_n_heads": 8}),
    "CwmForCausalLM": ("CwmConfig", {"head_dim": None, "hidden_size": 80}),
    "DiffLlamaForCausalLM": ("DiffLlamaConfig", {"hidden_size": 160, "head_dim": None}),
    "DogeForCausalLM": ("DogeConfig", {"hidden_size": 80, "head_dim": None}),
    "Ernie4_5ForCausalLM": ("Ernie4_5Config", {}),
    "ExaoneForCausalLM": ("ExaoneConfig", {"hidden_size": 80, "head_dim": None}),
    "Exaone4ForCausalLM": ("Exaone4Config", {"num_attention_heads": 32}),
    "GemmaForCausalLM": ("GemmaConfig", {"num_attention_heads": 32}),
    "GlmForCausalLM": ("GlmConfig", {}),
    "Glm4ForCausalLM": ("Glm4Config", {}),
    "GraniteForCausalLM": ("GraniteConfig", {}),
    "GraniteSWAForCausalLM": ("GraniteSWAConfig", {}),
    "HeliumForCausalLM": ("HeliumConfig", {}),
    "HunYuanDenseV1ForCausalLM": ("HunYuanDenseV1Config", {}),
    "HyperCLOVAXForCausalLM": ("HyperCLOVAXConfig", {"hidden_size": 80}),
    "InternLM3ForCausalLM": ("InternLM3Config", {"hidden_size": 80}),
    "IQuestCoderForCausalLM": ("IQuestCoderConfig", {"hidden_size": 80}),
    "Jais2ForCausalLM": ("Jais2Config", {"hidden_size": 80}),
    "MiniCPM3ForCausalLM": ("MiniCPM3Config", {"hidden_size": 80, "num_key_value_heads": 40}),
    "Ministral3ForCausalLM": ("Ministral3Config", {}),
    "MuseGlimmerForCausalLM": ("MuseGlimmerTextConfig", {"hidden_size": 80}),
    "NanoChatForCausalLM": ("NanoChatConfig", {}),
    "NemotronForCausalLM": ("NemotronConfig", {}),
    "OlmoForCausalLM": ("OlmoConfig", {}),
    "Olmo2ForCausalLM": ("Olmo2Config", {}),
    "Olmo3ForCausalLM": ("Olmo3Config", {}),
    "PhiForCausalLM": ("PhiConfig", {}),
    "Phi3ForCausalLM": ("Phi3Config", {"head_dim": None, "hidden_size": 160}),
    "SeedOssForCausalLM": ("SeedOssConfig", {}),
    "SmolLM3ForCausalLM": ("SmolLM3Config", {}),
    "Starcoder2ForCausalLM": ("Starcoder2Config", {}),
    "VaultGemmaForCausalLM": ("VaultGemmaConfig", {"hidden_size": 80}),
    "YoutuForCausalLM": ("YoutuConfig", {"num_key_value_heads": 40}),
}
SCALED = {"rope_type": "linear", "factor": 2.0}
LONG = {"short_factor": [1.0, 1.5], "long_factor": [1.0, 9.0]}
FLAGS = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
# Fields of the hub and of transformers 5, in values that are no defaults.
OTHER_FIELDS = [
    ("ApertusForCausalLM", {"attention_bias": True, "rope_scaling": SCALED, "rope_theta": 5e4}),
    ("ArceeForCausalLM", FLAGS),
    ("BambaForCausalLM", {"attn_layer_indices": [1, 3], "attention_bias": True, "rope_theta": 5e5}),
    ("BambaForCausalLM", {"mamba_d_head": 20, "mamba_n_groups": 2, "mamba_d_state": 8}),
    ("BambaForCausalLM", {"mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_d_conv": 3}),
    ("BambaForCausalLM", {"time_step_limit": [0.01, 0.5], "rms_norm_eps": 1e-6}),
    ("CohereForCausalLM", {"use_qk_norm": True, "logit_scale": 0.5, "attention_bias": True}),
    ("Cohere2ForCausalLM", {"sliding_window": 64, "sliding_window_pattern": 3, "head_dim": 32}),
    ("CwmForCausalLM", {"sliding_window": 64, "eos_token_id": 3, "rope_scaling": SCALED}),
    ("DiffLlamaForCausalLM", {"attention_bias": True, "num_key_value_heads": 8, "head_dim": 8}),
    ("DiffLlamaForCausalLM", {"rms_norm_eps": 1e-6, "rope_theta": 5e5, "hidden_act": "gelu"}),
    ("DiffLlamaForCausalLM", {"rope_scaling": SCALED, "eos_token_id": 7, "bos_token_id": None}),
    ("DogeForCausalLM", FLAGS | {"sliding_window": 64, "keep_window_size": 128}),
    ("DogeForCausalLM", {"num_key_value_heads": 8, "hidden_act": "gelu", "rope_scaling": SCALED}),
    ("Ernie4_5ForCausalLM", {"use_bias": True, "head_dim": None, "hidden_size": 80}),
    (
        "ExaoneForCausalLM",
        {"num_layers": 6, "layer_norm_epsilon": 1e-6, "activation_function": "gelu"},
    ),
    ("ExaoneForCausalLM", {"attention_bias": True, "mlp_bias": True, "rope_theta": 1e4}),
    ("InternLM3ForCausalLM", {"qkv_bias": True, "bias": True}),
    ("InternLM3ForCausalLM", {"attention_bias": True, "mlp_bias": True, "rope_theta": 5e7}),
    ("IQuestCoderForCausalLM", FLAGS | {"head_dim": None, "rope_theta": 5e5}),
    ("Exaone4ForCausalLM", {"sliding_window": 64, "sliding_window_pattern": 2}),
    (
        "Exaone4ForCausalLM",
        {"sliding_window": None, "layer_types": ["full_attention"] * 8, "rope_scaling": SCALED},
    ),
    ("GemmaForCausalLM", {"hidden_act": "gelu", "num_key_value_heads": 8}),
    ("GemmaForCausalLM", {"hidden_act": "silu", "hidden_activation": "gelu_pytorch_tanh"}),
    ("GlmForCausalLM", {"attention_bias": False, "partial_rotary_factor": 1.0}),
    ("Glm4ForCausalLM", {"eos_token_id": 7, "rope_parameters": {"rope_theta": 3e4}}),
    ("GraniteForCausalLM", FLAGS | {"logits_scaling": 8.0, "attention_multiplier": 0.5}),
    ("GraniteForCausalLM", {"residual_multiplier": 0.25, "embedding_multiplier": 12}),
    (
        "GraniteSWAForCausalLM",
        {"sliding_window": 64, "layer_rope_theta": [0, 1e4, 2e4, 0, 5, 6, 7, 8]},
    ),
    ("HeliumForCausalLM", {"attention_bias": True, "mlp_bias": True, "rope_theta": 1e4}),
    (
        "HunYuanDenseV1ForCausalLM",
        {"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}},
    ),
    ("HunYuanDenseV1ForCausalLM", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    ("HyperCLOVAXForCausalLM", FLAGS | {"logits_scaling": 0.5, "use_post_norm": False}),
    ("Jais2ForCausalLM", {"attention_bias": False, "mlp_bias": False, "layer_norm_eps": 1e-6}),
    (
        "MiniCPM3ForCausalLM",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False, "v_head_dim": 8},
    ),
    ("MiniCPM3ForCausalLM", {"scale_emb": 2.5, "scale_depth": 0.5, "dim_model_base": 40}),
    ("MiniCPM3ForCausalLM", {"scale_depth": None, "dim_model_base": None, "q_lora_rank": None}),
    ("MiniCPM3ForCausalLM", {"kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4}),
    (
        "MiniCPM3ForCausalLM",
        {
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0] * 16,
                "long_factor": [2.0] * 16,
                "original_max_position_embeddings": 4096,
                "factor": 2.0,
            },
            "rope_theta": 5e4,
        },
    ),
    ("Ministral3ForCausalLM", {"sliding_window": 64, "rms_norm_eps": 1e-6}),
    (
        "MuseGlimmerForCausalLM",
        FLAGS | {"sliding_window": 64, "layer_rope_theta": [1e4, 0, 5, 6, 0, 1, 1, 1]},
    ),
    (
        "MuseGlimmerForCausalLM",
        {"qk_scale_factor": 2.0, "output_multiplier": 0.5, "final_logit_softcapping": 3.0},
    ),
    (
        "MuseGlimmerForCausalLM",
        {"post_norm_eps": 1e-6, "hidden_activation": "gelu", "rope_scaling": SCALED},
    ),
    ("NanoChatForCausalLM", {"final_logit_softcapping": None, "attention_bias": True}),
    ("NemotronForCausalLM", FLAGS | {"norm_eps": 1e-6, "partial_rotary_factor": 1.0}),
    ("OlmoForCausalLM", {"clip_qkv": 8.0, "attention_bias": True, "rope_scaling": SCALED}),
    ("Olmo2ForCausalLM", {"rms_norm_eps": 1e-6, "attention_bias": True, "rope_theta": 5e5}),
    ("Olmo3ForCausalLM", {"sliding_window": 64, "rope_scaling": SCALED, "rope_theta": 5e5}),
    ("PhiForCausalLM", {"qk_layernorm": True, "partial_rotary_factor": 1.0, "rope_theta": 1e5}),
    ("Phi3ForCausalLM", {"rope_scaling": {"type": "longrope", **LONG}}),
    ("Phi3ForCausalLM", {"sliding_window": 2047}),
    (
        "Phi3ForCausalLM",
        {
            "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
            "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 1024,
        },
    ),
    ("SeedOssForCausalLM", {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}),
    ("SmolLM3ForCausalLM", {"use_sliding_window": True, "sliding_window": 64}),
    ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0] * 4, "no_rope_layer_interval": 3}),
    ("Starcoder2ForCausalLM", {"sliding_window": 64, "use_bias": False, "norm_epsilon": 1e-6}),
    ("VaultGemmaForCausalLM", {"sliding_window": 64, "query_pre_attn_scalar": 8}),
    ("YoutuForCausalLM", {"attention_bias": True, "rope_interleave": False, "q_lora_rank": None}),
    ("YoutuForCausalLM", {"tie_word_embeddings": False, "rope_theta": 1.6e6, "rms_norm_eps": 1e-5}),
]


def make_hf_config(architecture: str, **fields: object) -> dict[str, object]:
    """A config.json of this architecture; a field given as None is left out."""
    config = {"architectures": [architecture], **SIZES, **FAMILIES[architecture][1], **fields}
    return {name: value for name, value in config.items() if value is not None}


def as_read(hf_config: dict[str, object]):
    """The config, without the name of the type, which only transformers writes."""
    model_type = FAMILIES[hf_config["architectures"][0]][0]
    return read_config(hf_config | {"model_type": model_type})


@pytest.mark.parametrize("architecture", FAMILIES)
def test_fields_left_out_have_transformers_defaults(architecture):
    hf_config = make_hf_config(architecture)
    theirs = as_transformers_reads_it(hf_config, FAMILIES[architecture][0])
    assert isinstance(as_read(hf_config), DenseConfig | LayerNormConfig)
    assert as_read(hf_config) == as_read(theirs)


@pytest.mark.parametrize(("architecture", "fields"), OTHER_FIELDS)
def test_other_fields_mean_what_they_mean_in_transformers(architecture, fields):
    hf_config = make_hf_config(architecture) | fields
    theirs = as_transformers_reads_it(hf_config, FAMILIES[architecture][0])
    assert as_read(hf_config) == as_read(theirs)
    assert as_read(hf_config) != as_read(make_hf_config(architecture))


def kinds(architecture: str, **fields: object) -> list[int]:
    """For each layer, the first layer of the same kind."""
    config = read_config(make_hf_config(architecture, **fields))
    model = nnx.eval_shape(
        lambda: family_class(architecture)(config, has_head_kernel=True, dtype=jnp.dtype("float32"))
    )
    found = [kind_of(layer) for layer in model.layers]
    return [found.index(kind) for kind in found]


@pytest.mark.parametrize("architecture", FAMILIES)
def test_layers_that_differ_in_weights_only_may_run_in_a_loop(architecture):
    # Four layers have every kind that eight have. A list has as many entries as there are layers.
    hf_config = make_hf_config(architecture)
    fields = {name: value[:4] for name, value in hf_config.items() if name in LISTS_BY_LAYER}
    fields["num_hidden_layers"] = 4
    attention = attention_of(architecture, **fields)
    assert kinds(architecture, **fields) == [attention.index(layer) for layer in attention]


def attention_of(architecture: str, **fields: object):
    return read_config(make_hf_config(architecture, **fields)).attention


def test_layers_without_positions_by_hand():
    for architecture, wanted in (
        ("SmolLM3ForCausalLM", [True, True, True, False] * 2),
        ("Cohere2ForCausalLM", [True, True, True, False] * 2),
        ("Exaone4ForCausalLM", [True, True, True, False] * 2),
        ("MuseGlimmerForCausalLM", [True, True, True, False] * 2),
        ("CwmForCausalLM", [True] * 8),
    ):
        assert [layer.has_positions for layer in attention_of(architecture)] == wanted
    thetas = [0, 1e4, 2e4, 0, 5, 6, 7, 8]
    layers = attention_of("GraniteSWAForCausalLM", layer_rope_theta=thetas)
    assert [layer.has_positions for layer in layers] == [theta != 0 for theta in thetas]
    assert [layer.rope.theta for layer in layers[1:3]] == [1e4, 2e4]
    layers = attention_of("MuseGlimmerForCausalLM", layer_rope_theta=thetas, rope_theta=7.0)
    assert [layer.has_positions for layer in layers] == [theta != 0 for theta in thetas]
    assert {layer.rope.theta for layer in layers} == {7.0}


def test_exaone_without_a_window_has_positions_in_all_layers():
    hf_config = make_hf_config("Exaone4ForCausalLM") | {"sliding_window": None}
    layers = read_config(hf_config).attention
    assert {(layer.has_positions, layer.sliding_window) for layer in layers} == {(True, None)}


def test_exaone_pattern_of_letters_is_that_of_the_number():
    assert attention_of("Exaone4ForCausalLM", sliding_window_pattern="LLLG") == attention_of(
        "Exaone4ForCausalLM", sliding_window_pattern=4
    )


def test_only_full_layers_of_olmo3_have_scaled_rotary_embeddings():
    layers = attention_of("Olmo3ForCausalLM", sliding_window=64, rope_scaling=SCALED)
    assert layers[3].rope == RopeConfig(kind="linear", factor=2.0, theta=5e5)
    assert layers[0].rope == RopeConfig(theta=5e5)
    assert [layer.sliding_window for layer in layers] == [64, 64, 64, None] * 2


def test_dynamic_embedding_of_hunyuan_with_alpha_has_a_fixed_base():
    scaling = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}
    layer = attention_of("HunYuanDenseV1ForCausalLM", rope_scaling=scaling)[0]
    assert layer.rope == RopeConfig(theta=1e4 * 1000.0**2)  # head_dim / (head_dim - 2) is 2


@pytest.mark.parametrize("name", ["su", "yarn"])
def test_older_names_of_longrope_are_read(name):
    older, newer = (
        attention_of("Phi3ForCausalLM", rope_scaling={"type": kind, **LONG})
        for kind in (name, "longrope")
    )
    assert older == newer
    assert newer[0].rope.kind == "longrope"


def test_phi3_has_short_factors_if_requests_are_short():
    config = read_config(make_hf_config("Phi3ForCausalLM", rope_scaling={"type": "su", **LONG}))
    for length, is_long in ((None, True), (4097, True), (4096, False)):
        assert {layer.rope.is_long for layer in config.for_length(length).attention} == {is_long}


def test_ministral_scales_queries_after_the_original_length():
    config = read_config(make_hf_config("Ministral3ForCausalLM"))
    assert config.query_scale == QueryScale(weight=0.1, period=16_384, offset=0)
    rope = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128}
    plain = read_config(make_hf_config("Ministral3ForCausalLM", rope_parameters=rope))
    assert plain.query_scale is None
    for one, has_factor in ((config, True), (plain, False)):
        model = nnx.eval_shape(
            lambda one=one: family_class("Ministral3ForCausalLM")(
                one, has_head_kernel=True, dtype=jnp.dtype("float32")
            )
        )
        attention = model.layers[0].self_attn
        assert isinstance(attention, ScaledQueriesAttention) == has_factor


def test_olmo_clips_if_config_json_has_a_bound():
    config = read_config(make_hf_config("OlmoForCausalLM", clip_qkv=8.0))
    model = nnx.eval_shape(
        lambda: family_class("OlmoForCausalLM")(
            config, has_head_kernel=True, dtype=jnp.dtype("float32")
        )
    )
    attention = model.layers[0].self_attn
    assert isinstance(attention, ClippedAttention)
    assert attention.bound == 8.0


@pytest.mark.parametrize(
    ("architecture", "fields", "error", "message"),
    [
        ("ApertusForCausalLM", {"hidden_act": "silu"}, UnsupportedModelError, "hidden_act='silu'"),
        ("InternLM3ForCausalLM", {"qkv_bias": True, "bias": False}, UnsupportedModelError, "bias"),
        ("IQuestCoderForCausalLM", {"clip_qkv": 8.0}, UnsupportedModelError, "clip_qkv=8.0"),
        ("ApertusForCausalLM", {"qk_norm": False}, UnsupportedModelError, "qk_norm=False"),
        (
            "DiffLlamaForCausalLM",
            {"num_key_value_heads": 5},
            ModelConfigError,
            "num_key_value_heads=5 is odd",
        ),
        (
            "GraniteSWAForCausalLM",
            {"layer_rope_theta": [1e4]},
            ModelConfigError,
            "expected a list of 8 numbers",
        ),
        (
            "HunYuanDenseV1ForCausalLM",
            {"use_qk_norm": False},
            UnsupportedModelError,
            "use_qk_norm=False",
        ),
        (
            "HunYuanDenseV1ForCausalLM",
            {"use_cla": True},
            UnsupportedModelError,
            "use_cla=True",
        ),
        (
            "PhiForCausalLM",
            {"tie_word_embeddings": True},
            UnsupportedModelError,
            "tie_word_embeddings=True",
        ),
        (
            "Exaone4ForCausalLM",
            {"sliding_window_pattern": "LLX"},
            ModelConfigError,
            "sliding_window_pattern is 'LLX'",
        ),
    ],
)
def test_fields_that_are_not_computed_are_refused(architecture, fields, error, message):
    with pytest.raises(error, match=message):
        read_config(make_hf_config(architecture) | fields)
