"""What layers keep in the cache, from their attention."""

import dataclasses

import pytest

from models.cache.attention_format import AttentionFormat
from models.cache.format import CacheFormat
from models.config.attention_config import AttentionConfig
from models.config.rope_config import RopeConfig
from models.decoder_spec import CacheRef, DecoderSpec, LayerSpec, spec_of_attention
from models.errors import ModelConfigError
from models.registry import read_config

FULL = AttentionConfig(
    hidden_size=64, num_q_heads=4, num_kv_heads=2, head_dim=24, rope=RopeConfig(), scale=0.25
)
SLIDING = dataclasses.replace(FULL, sliding_window=8)
CHUNKED = dataclasses.replace(FULL, chunk_size=16)


def spec(*layers: AttentionConfig, **options: bool) -> DecoderSpec:
    return spec_of_attention(layers, kv_dtype="float32", **options)


def reading(layer: AttentionConfig, layer_idx: int) -> AttentionConfig:
    return dataclasses.replace(layer, kv_layer_idx=layer_idx)


def test_kinds_of_caches_follow_from_the_keys_that_layers_see():
    formats = spec(FULL, SLIDING, CHUNKED).own_formats
    assert formats == {
        "model.layers.0.self_attn": AttentionFormat(num_kv_heads=2, head_dim=24, dtype="float32"),
        "model.layers.1.self_attn": AttentionFormat(
            num_kv_heads=2, head_dim=24, dtype="float32", kind="window", sliding_window=8
        ),
        "model.layers.2.self_attn": AttentionFormat(
            num_kv_heads=2, head_dim=24, dtype="float32", kind="chunk", chunk_size=16
        ),
    }


class TwoCachesConfig(AttentionConfig):
    """A layer that also has a cache of few heads, under its own name."""

    def formats(self, kv_dtype: str) -> dict[str, CacheFormat]:
        own = super().formats(kv_dtype)
        return own | {"small": dataclasses.replace(own["self_attn"], num_kv_heads=1)}


def test_a_layer_may_have_several_caches_and_share_one_of_them():
    first = TwoCachesConfig(**dataclasses.asdict(FULL) | {"rope": FULL.rope})
    found = spec(first, reading(first, 0), FULL)
    assert [[name for name, _ in layer.caches] for layer in found.layers] == [
        ["self_attn", "small"],
        ["self_attn", "small"],
        ["self_attn"],
    ]
    assert found.owners == {"model.layers.1.self_attn": "model.layers.0.self_attn"}
    assert {name: cache.num_kv_heads for name, cache in found.own_formats.items()} == {
        "model.layers.0.self_attn": 2,
        "model.layers.0.small": 1,
        "model.layers.1.small": 1,
        "model.layers.2.self_attn": 2,
    }


def test_layers_without_attention_keep_nothing():
    found = spec(None, SLIDING, None, reading(SLIDING, 1))
    assert [dict(layer.caches).keys() for layer in found.layers] == [
        set(),
        {"self_attn"},
        set(),
        {"self_attn"},
    ]
    assert found.owners == {"model.layers.3.self_attn": "model.layers.1.self_attn"}
    with pytest.raises(ModelConfigError, match="layer 1 shares the keys and values of layer 0"):
        spec(None, reading(FULL, 0))


def test_all_layers_keep_all_tokens_if_their_caches_are_unified():
    formats = spec(FULL, SLIDING, CHUNKED, has_unified_kv=True).own_formats
    assert set(formats.values()) == {
        AttentionFormat(
            num_kv_heads=2, head_dim=24, dtype="float32", sliding_window=8, chunk_size=16
        )
    }


@pytest.mark.parametrize(("v_head_dim", "width"), [(16, 24), (24, 24), (32, 32)])
def test_the_wider_of_keys_and_values_says_how_wide_both_are_stored(v_head_dim, width):
    (cache,) = spec(dataclasses.replace(FULL, v_head_dim=v_head_dim)).own_formats.values()
    assert cache.head_dim == width
    assert cache.content_bytes(16) == 2 * (24 + v_head_dim) * 16 * 4


def test_layers_that_share_have_no_cache_of_their_own():
    shared = spec(SLIDING, FULL, reading(SLIDING, 0), reading(FULL, 1), reading(FULL, 1))
    assert list(shared.own_formats) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert shared.owners == {
        "model.layers.2.self_attn": "model.layers.0.self_attn",
        "model.layers.3.self_attn": "model.layers.1.self_attn",
        "model.layers.4.self_attn": "model.layers.1.self_attn",
    }


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (
            [FULL, reading(FULL, 1)],
            "layer 1 shares the keys and values of layer 1; expected an earl",
        ),
        (
            [reading(FULL, 1), FULL],
            "layer 0 shares the keys and values of layer 1; expected an earl",
        ),
        ([FULL, reading(FULL, -2)], "layer 1 shares the keys and values of layer -2; expected an"),
        (
            [FULL, reading(FULL, 0), reading(FULL, 1)],
            "layer 2 shares the keys and values of layer 1; expected an earlier layer that has its",
        ),
        ([FULL, reading(SLIDING, 0)], "layer 1 shares .* of layer 0, which has 2 KV .*=None and"),
    ],
)
def test_keys_and_values_that_a_layer_cannot_read_are_refused(layers, message):
    with pytest.raises(ModelConfigError, match=message):
        spec(*layers)


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
    decoder = config.spec("bfloat16")
    assert decoder.own_formats == {
        "model.layers.0.self_attn": cache,
        "model.layers.1.self_attn": cache,
    }
    assert decoder.owners == {}
    assert hash(decoder) == hash(config.spec("bfloat16"))


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
    decoder = DecoderSpec(layers=(own, LayerSpec(name="layers.without"), sharing))
    assert decoder.own_formats == {"layers.0.self_attn": cache, "layers.0.index": index}
    assert decoder.owners == {"layers.1.self_attn": "layers.0.self_attn"}
