"""The KV cache needs of a model's layers."""

import dataclasses

from models.kv_layers import (
    CachePlace,
    LayerKVSpec,
    group_layers,
    kv_cache_layers,
    place_layers,
)
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


def grouped(kinds: str) -> list[str]:
    """Layer indices per group, "SSF" being two sliding layers and a full one."""
    groups = group_layers({str(idx): kind for idx, kind in enumerate(kinds)})
    return [" ".join(group) for group in groups]


def test_groups_are_as_large_as_the_rarest_kind_is_common():
    assert grouped("FFF") == ["0 1 2"]
    assert grouped("SFSFS") == ["0 4", "2", "1 3"]
    assert grouped("SSSSSFS") == ["0", "1", "2", "3", "4", "6", "5"]
    # Gemma 3 with 26 layers: 22 sliding ones in 6 groups of at most 4, and the 4 full ones.
    sizes = [len(group.split()) for group in grouped(("SSSSSF" * 5)[:26])]
    assert sizes == [4, 4, 4, 4, 3, 3, 4]


def test_nearly_equal_kinds_are_padded_and_not_split():
    # 5 to 6 is below 1.25: two groups and six rows. 4 to 5 is not.
    assert [len(group.split()) for group in grouped("S" * 6 + "F" * 5)] == [6, 5]
    assert [len(group.split()) for group in grouped("S" * 5 + "F" * 4)] == [3, 2, 4]


def test_no_layers_make_no_groups():
    assert group_layers({}) == ()


def test_layer_has_the_group_and_row_of_its_name_and_shares_its_targets():
    def layer(name: str, window: int | None = None, target: str | None = None) -> LayerKVSpec:
        return LayerKVSpec(
            name=name, num_kv_heads=2, head_dim=16, sliding_window=window, kv_sharing_target=target
        )

    layers = (layer("a", 8), layer("b"), layer("c", 8), layer("d", target="b"))
    assert place_layers(layers) == {
        "a": CachePlace(group_idx=0, row=0),
        "c": CachePlace(group_idx=1, row=0),
        "b": CachePlace(group_idx=2, row=0),
        "d": CachePlace(group_idx=2, row=0),
    }


def test_layers_of_two_windows_cache_apart():
    config = read_config(GEMMA2)
    assert [layer.sliding_window for layer in kv_cache_layers(config)] == [32, None, 32, None]
    assert {place.group_idx for place in place_layers(kv_cache_layers(config)).values()} == {0, 1}


def test_unified_layers_share_one_table_whatever_their_windows():
    config = dataclasses.replace(read_config(GEMMA2), has_unified_kv=True)
    layers = kv_cache_layers(config)
    assert {(layer.sliding_window, layer.unified_window) for layer in layers} == {(None, 32)}
    assert [place.row for place in place_layers(layers).values()] == [0, 1, 2, 3]
    # Attention still looks back over the windows only.
    assert [layer.sliding_window for layer in config.attention] == [32, None, 32, None]
