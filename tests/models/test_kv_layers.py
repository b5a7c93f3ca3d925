"""The KV cache needs of a model's layers."""

from models.config import ModelConfig
from models.kv_layers import LayerKVSpec, kv_cache_layers


def test_every_layer_caches_its_kv_heads():
    config = ModelConfig.from_hf(
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
