"""The KV cache needs of a model's layers."""

import dataclasses

from models.kv_layers import LayerKVSpec, kv_cache_layers
from models.registry import read_config

GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"],
    "vocab_size": 10,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "sliding_window": 32,
}


def test_every_layer_caches_its_kv_heads():
    config = read_config(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "vocab_size": 10,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 128,
        }
    )
    assert kv_cache_layers(config) == (
        LayerKVSpec(name="model.layers.0.self_attn", num_kv_heads=2, head_dim=32),
        LayerKVSpec(name="model.layers.1.self_attn", num_kv_heads=2, head_dim=32),
    )


def test_layers_of_two_windows_cache_apart():
    config = read_config(GEMMA2)
    assert [layer.sliding_window for layer in kv_cache_layers(config)] == [32, None, 32, None]


def test_unified_layers_share_one_table_whatever_their_windows():
    config = dataclasses.replace(read_config(GEMMA2), has_unified_kv=True)
    layers = kv_cache_layers(config)
    assert {(layer.sliding_window, layer.unified_window) for layer in layers} == {(None, 32)}
    # Attention still looks back over the windows only.
    assert [layer.sliding_window for layer in config.attention] == [32, None, 32, None]
