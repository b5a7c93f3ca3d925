"""Which layers have an index, and which latents they read."""

import pytest

from models.config.index_config import INDEX_KEYS
from models.errors import ModelConfigError, UnsupportedModelError
from models.registry import read_config
from tests.models.families.read_by_transformers import as_transformers_reads_it

SIZES = {
    "vocab_size": 16,
    "hidden_size": 64,
    "intermediate_size": 24,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 256,
}
GLM = {"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", **SIZES}
V32 = {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", **SIZES}
MISTRAL = {
    "architectures": ["MistralLarge4ForCausalLM"],
    "model_type": "mistral_large4_text",
    **SIZES,
}
SHARED = {"no_rope_layers": [1, 1, 0, 0, 1, 1], "kv_source_layers": [0, 0, 2, 2, 0, 5]}


@pytest.mark.parametrize(
    ("hf_config", "config_class"),
    [
        (GLM | {"index_topk_freq": 3}, "GlmMoeDsaConfig"),
        (GLM | {"index_topk_freq": 2, "index_skip_topk_offset": 3}, "GlmMoeDsaConfig"),
        (GLM | {"index_topk_pattern": "FSSFSF"}, "GlmMoeDsaConfig"),
        (GLM | {"index_topk_pattern": ["full"] * 3 + ["shared"] * 3}, "GlmMoeDsaConfig"),
        (GLM | {"index_n_heads": 4, "index_head_dim": 96, "index_topk": 7}, "GlmMoeDsaConfig"),
        (V32 | {"mlp_layer_types": ["sparse", "dense"] * 3}, "DeepseekV32Config"),
        (V32 | {"layer_types": ["deepseek_sparse_attention"] * 6}, "DeepseekV32Config"),
        (GLM | {"layer_types": ["deepseek_sparse_attention"] * 6}, "GlmMoeDsaConfig"),
        (MISTRAL | SHARED | {"indexer_types": ["full", "shared"] * 3}, "MistralLarge4TextConfig"),
        (MISTRAL | {"no_rope_layer_interval": 2}, "MistralLarge4TextConfig"),
        (MISTRAL | {"rope_parameters": {"rope_type": "default"}}, "MistralLarge4TextConfig"),
    ],
)
def test_fields_mean_what_they_mean_in_transformers(hf_config, config_class):
    theirs = as_transformers_reads_it(hf_config, config_class)
    assert read_config(hf_config) == read_config(theirs)


@pytest.mark.parametrize("hf_config", [GLM, V32, MISTRAL])
def test_attention_always_turns_neighbors(hf_config):
    # Unlike in DeepSeek V3, for which null means the opposite.
    assert read_config(hf_config | {"rope_interleave": None}) == read_config(hf_config)


def test_layers_share_indexes_and_latents():
    config = read_config(MISTRAL | SHARED | {"indexer_types": ["full", "shared"] * 3})
    spec = config.spec("float32")
    assert [[name for name, _ in layer.caches] for layer in spec.layers] == [
        ["self_attn", INDEX_KEYS],
        ["self_attn"],
    ] * 3
    assert {name[13]: owner[13] for name, owner in spec.owners.items()} == {
        "1": "0",
        "3": "2",
        "4": "0",
    }
    # Layers without positions cache no rotary key.
    assert [layer.rope_dim for layer in config.attention] == [64, 64, 0, 0, 64, 64]
    assert [layer.nope_dim for layer in config.attention] == [64, 64, 128, 128, 64, 64]


@pytest.mark.parametrize("hf_config", [GLM, V32, MISTRAL])
def test_index_keys_have_no_cache_if_all_tokens_are_chosen(hf_config):
    config = read_config(hf_config | {"index_topk": 100})
    for length, names in ((101, ["self_attn", INDEX_KEYS]), (100, ["self_attn"])):
        spec = config.for_length(length).spec("float32")
        assert [[name for name, _ in layer.caches] for layer in spec.layers] == [names] * 6


@pytest.mark.parametrize(
    ("hf_config", "message"),
    [
        (GLM | {"indexer_types": ["shared"] + ["full"] * 5}, "first layer shares the index"),
        (GLM | {"indexer_types": ["full"] * 5}, "expected a list of 6 names, 'full' or 'shared'"),
        (GLM | {"index_topk_pattern": "FFFFFX"}, "expected a list of 6 names"),
        (V32 | {"index_head_dim": 32}, "index_head_dim is 32; expected at least .*_dim=64"),
        (MISTRAL | {"kv_source_layers": [0, 1, 1, 2, 4, 5]}, "expected a number for each of 6"),
        (MISTRAL | {"kv_source_layers": [1, 1, 2, 3, 4, 5]}, "expected a number for each of 6"),
    ],
)
def test_layers_that_contradict_each_other_are_named(hf_config, message):
    with pytest.raises(ModelConfigError, match=message):
        read_config(hf_config)


@pytest.mark.parametrize(
    ("hf_config", "message"),
    [
        (V32 | {"q_lora_rank": None}, "q_lora_rank=null is not supported"),
        (V32 | {"layer_types": ["full_attention"] * 6}, "'indexed_attention' for each of the 6"),
        (V32 | {"layer_types": ["indexed_attention"] * 5}, "'indexed_attention' for each of the 6"),
        (V32 | {"index_topk_freq": 2}, "an index in some layers only"),
        (V32 | {"index_topk_pattern": "FFFSSS"}, "an index in some layers only"),
        (V32 | {"indexer_types": ["full", "shared"] * 3}, "an index in some layers only"),
        (V32 | {"rope_interleave": False}, "rope_interleave=False is not supported"),
        (GLM | {"rope_interleave": False}, "rope_interleave=False is not supported"),
        (MISTRAL | {"rope_interleave": False}, "rope_interleave=False is not supported"),
        (V32 | {"indexer_rope_interleave": True}, "indexer_rope_interleave=True is not"),
        (GLM | {"indexer_rope_interleave": False}, "indexer_rope_interleave=False is not"),
        (MISTRAL | {"indexer_rope_interleave": False}, "indexer_rope_interleave=False is not"),
        # Layer 1 has positions, and layer 0 has none.
        (
            MISTRAL | SHARED | {"no_rope_layers": [0, 1, 1, 1, 1, 1]},
            "layer 1 reads the latents of layer 0",
        ),
        # transformers has only the latents of layer 1 then.
        (
            MISTRAL | {"no_rope_layers": [1] * 6, "kv_source_layers": [0, 1, 1, 0, 4, 5]},
            "layer 3 reads the latents of layer 0",
        ),
        (MISTRAL | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type"),
    ],
)
def test_what_is_not_computed_is_refused(hf_config, message):
    with pytest.raises(UnsupportedModelError, match=message):
        read_config(hf_config)
