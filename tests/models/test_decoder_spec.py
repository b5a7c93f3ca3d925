"""What the layers of a model keep in the KV cache."""

import dataclasses

from models.cache.attention_format import AttentionFormat
from models.decoder_spec import CacheRef, DecoderSpec, LayerSpec
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


def formats_of(config, kv_dtype="float32"):
    return list(config.spec(kv_dtype).own_formats.values())


def test_every_layer_keeps_its_kv_heads():
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
    cache = AttentionFormat(num_kv_heads=2, head_dim=32, dtype="bfloat16")
    spec = config.spec("bfloat16")
    assert spec.own_formats == {
        "model.layers.0.self_attn": cache,
        "model.layers.1.self_attn": cache,
    }
    assert spec.owners == {}
    assert hash(spec) == hash(config.spec("bfloat16"))


def test_layers_of_two_windows_keep_different_tokens():
    formats = formats_of(read_config(GEMMA2))
    assert [(cache.kind, cache.sliding_window) for cache in formats] == [
        ("window", 32),
        ("full", None),
        ("window", 32),
        ("full", None),
    ]


def test_unified_layers_keep_all_tokens_whatever_their_windows():
    config = dataclasses.replace(read_config(GEMMA2), has_unified_kv=True)
    formats = formats_of(config)
    assert {(cache.kind, cache.sliding_window) for cache in formats} == {("full", 32)}
    assert len(set(formats)) == 1
    # Attention still looks back over the windows only.
    assert [layer.sliding_window for layer in config.attention] == [32, None, 32, None]


def test_cache_of_another_layer_is_named_by_its_owner_and_has_no_format_of_its_own():
    cache = AttentionFormat(num_kv_heads=1, head_dim=8, dtype="float32")
    index = dataclasses.replace(cache, head_dim=16)
    own = LayerSpec(
        name="layers.0",
        caches=(("self_attn", CacheRef(format=cache)), ("index", CacheRef(format=index))),
    )
    sharing = LayerSpec(
        name="layers.1",
        caches=(("self_attn", CacheRef(format=cache, owner="layers.0.self_attn")),),
    )
    spec = DecoderSpec(layers=(own, LayerSpec(name="layers.without"), sharing))
    assert spec.own_formats == {"layers.0.self_attn": cache, "layers.0.index": index}
    assert spec.owners == {"layers.1.self_attn": "layers.0.self_attn"}
