"""Layers of one kind form groups, and all groups' pages have the same bytes."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import LayerKVSpec
from models.kv_layers import CachePlace, place_layers
from paxkv.contracts.kv_cache_spec import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from paxkv.errors import ConfigError, InvariantError
from paxkv.runner.memory import kv_cache_groups
from paxkv.runner.memory.kv_cache_groups import (
    groups_of_layers,
    make_kv_cache_groups,
    unify_page_sizes,
)


def full(num_kv_heads=2, *, block_size=16, dtype="bfloat16", **fields):
    return FullAttentionSpec(
        block_size=block_size, num_kv_heads=num_kv_heads, head_size=32, dtype=dtype, **fields
    )


def sliding(window, num_kv_heads=2):
    return SlidingWindowSpec(
        block_size=16,
        num_kv_heads=num_kv_heads,
        head_size=32,
        dtype="bfloat16",
        sliding_window=window,
    )


def state(num_bytes, **fields):
    return MambaSpec(block_size=64, shapes=((num_bytes,),), dtypes=("int8",), **fields)


def layer(name, window=None, target=None, num_kv_heads=2):
    return LayerKVSpec(
        name=name,
        num_kv_heads=num_kv_heads,
        head_dim=32,
        sliding_window=window,
        kv_sharing_target=target,
    )


def names(groups):
    return [group.layer_names for group in groups.kv_cache_groups]


def test_five_sliding_layers_to_one_full_share_rows_as_many_as_full_layers():
    # Gemma 3's pattern, 12 layers: two full ones, so six groups of two.
    layers = tuple(layer(str(i), None if i % 6 == 5 else 64) for i in range(12))
    groups = groups_of_layers(layers, block_size=16, dtype="bfloat16")
    assert names(groups) == [
        ("0", "6"), ("1", "7"), ("2", "8"), ("3", "9"), ("4", "10"), ("5", "11"),
    ]  # fmt: skip
    specs = [group.kv_cache_spec for group in groups.kv_cache_groups]
    assert specs == [sliding(64)] * 5 + [full()]
    config = groups.config(num_blocks=7)
    assert (config.num_blocks, config.num_rows) == (7, 2)


def test_unified_layers_are_one_group_that_names_their_window():
    layers = tuple(
        LayerKVSpec(name=str(i), num_kv_heads=2, head_dim=64, unified_window=32) for i in range(4)
    )
    groups = groups_of_layers(layers, block_size=16, dtype="bfloat16").kv_cache_groups
    assert [group.layer_names for group in groups] == [("0", "1", "2", "3")]
    spec = groups[0].kv_cache_spec
    assert isinstance(spec, FullAttentionSpec) and spec.sliding_window == 32


def test_layer_that_shares_keys_and_values_stands_in_no_group():
    layers = (layer("0"), layer("1", 64), layer("2", target="0"))
    groups = groups_of_layers(layers, block_size=16, dtype="bfloat16")
    assert names(groups) == [("0",), ("1",)]
    assert groups.config(num_blocks=7).kv_sharing_targets == (("2", "0"),)


@pytest.mark.parametrize("target", ["nowhere", "2"])
def test_layer_that_shares_with_one_that_has_nothing_is_a_bug(target):
    with pytest.raises(InvariantError, match=f"got '{target}', wanted one of"):
        make_kv_cache_groups({"0": full(), "2": None}, kv_sharing_targets={"1": target})


def test_layers_that_cache_nothing_stand_in_no_group():
    groups = make_kv_cache_groups({"encoder": None, "decoder": full()})
    assert names(groups) == [("decoder",)]
    with pytest.raises(ConfigError, match=r"no layer .* \['encoder'\]"):
        make_kv_cache_groups({"encoder": None})


def test_smaller_pages_get_longer_blocks():
    # A quarter of the heads: four times the tokens in a page of the same bytes.
    specs = {
        "big": full(8),
        "small": sliding(64, num_kv_heads=2),
        "one_byte": full(8, dtype="int8"),
    }
    unified = unify_page_sizes(specs)
    assert {name: spec.block_size for name, spec in unified.items()} == {
        "big": 16,
        "small": 64,
        "one_byte": 32,
    }
    assert {spec.page_size_bytes for spec in unified.values()} == {16 * 8 * 2 * 32 * 2}
    groups = make_kv_cache_groups(specs)
    assert groups.config(num_blocks=9).resolved_hash_block_size == 16


def test_padded_page_grows_with_its_block():
    # 4,096 bytes padded to 6,000 beside pages of 12,000.
    specs = {"a": full(page_size_padded=6000), "b": full(4, page_size_padded=12_000)}
    unified = unify_page_sizes(specs)
    assert unified["a"] == full(block_size=32, page_size_padded=12_000)
    assert unified["b"] == specs["b"]


def test_blocks_of_attention_grow_until_a_state_fits_a_page():
    # Pages of 4,096 and 16,384 bytes beside a state of 20,000: two of the larger hold it.
    specs = {"small": full(2), "state": state(20_000), "big": full(8)}
    unified = unify_page_sizes(specs)
    assert unified["big"].block_size == 32
    assert unified["small"].block_size == 128
    assert unified["state"] == state(20_000, page_size_padded=32_768)


def test_states_alone_are_padded_to_the_largest():
    unified = unify_page_sizes({"a": state(300), "b": state(500)})
    assert [spec.page_size_bytes for spec in unified.values()] == [500, 500]
    assert unified["b"] == state(500)


def test_pages_that_cannot_agree_are_named_with_their_bytes():
    latent = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=96, dtype="bfloat16")
    with pytest.raises(ConfigError) as raised:
        make_kv_cache_groups({"mla": latent, "full": full(2), "other": full(2)})
    # 3 x 1,024 bytes do not divide 4,096.
    message = str(raised.value)
    assert "layers ['mla']" in message and "['full', 'other']" in message
    assert "pages of [3072] bytes, wanted divisors of 4096" in message


@settings(max_examples=200)
@given(
    st.lists(
        st.one_of(
            st.builds(full, st.sampled_from([1, 2, 4, 8])),
            st.builds(sliding, st.sampled_from([32, 64]), st.sampled_from([1, 2, 4])),
            st.builds(state, st.integers(1, 100_000)),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_any_mixture_is_grouped_whole_with_equal_pages(specs):
    by_name = {f"layer.{i}": spec for i, spec in enumerate(specs)}
    groups = make_kv_cache_groups(by_name).kv_cache_groups
    assert sorted(n for group in groups for n in group.layer_names) == sorted(by_name)
    assert len({group.kv_cache_spec.page_size_bytes for group in groups}) == 1
    for group in groups:
        for name in group.layer_names:
            changed = {"block_size"}
            if isinstance(by_name[name], MambaSpec):
                changed = {"page_size_padded"}
                assert group.kv_cache_spec.page_size_bytes >= by_name[name].page_size_bytes
            else:
                assert group.kv_cache_spec.block_size % by_name[name].block_size == 0
            kept = {f.name for f in dataclasses.fields(by_name[name])} - changed
            assert all(getattr(group.kv_cache_spec, k) == getattr(by_name[name], k) for k in kept)


@settings(max_examples=200)
@given(st.lists(st.sampled_from([None, 32, 64]), min_size=1, max_size=40), st.data())
def test_memory_lies_where_the_models_layers_look_for_it(windows, data):
    layers = []
    for i, window in enumerate(windows):
        own = [other.name for other in layers if other.kv_sharing_target is None]
        target = data.draw(st.sampled_from([None, *own[:2]]))
        layers.append(layer(str(i), window, target))
    groups = groups_of_layers(tuple(layers), block_size=16, dtype="float32").kv_cache_groups
    for name, place in place_layers(tuple(layers)).items():
        target = layers[int(name)].kv_sharing_target or name
        assert groups[place.group_idx].layer_names[place.row] == target


def test_model_that_looks_elsewhere_is_a_bug(monkeypatch):
    def swapped(layers):
        return {
            "0": CachePlace(group_idx=0, row=1),
            "1": CachePlace(group_idx=0, row=0),
            "2": CachePlace(group_idx=1, row=0),
        }

    monkeypatch.setattr(kv_cache_groups, "place_layers", swapped)
    layers = (layer("0"), layer("1"), layer("2", 64))
    with pytest.raises(InvariantError, match="look for their .group, row. at"):
        groups_of_layers(layers, block_size=16, dtype="float32")
