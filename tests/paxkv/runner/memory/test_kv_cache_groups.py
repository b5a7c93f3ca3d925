"""Layers of one kind form groups, and all groups' pages have the same bytes."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import LayerKVSpec
from paxkv.contracts.kv_cache_spec import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from paxkv.errors import ConfigError, InvariantError
from paxkv.runner.memory.kv_cache_groups import (
    group_layers,
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


@settings(max_examples=200)
@given(st.lists(st.sampled_from([None, 32, 64]), min_size=1, max_size=40), st.data())
def test_layer_has_the_group_and_row_of_its_name_or_of_its_target(windows, data):
    layers = []
    for i, window in enumerate(windows):
        own = [other.name for other in layers if other.kv_sharing_target is None]
        target = data.draw(st.sampled_from([None, *own[:2]]))
        layers.append(layer(str(i), window, target))
    groups = groups_of_layers(tuple(layers), block_size=16, dtype="float32")
    for own, place in zip(layers, groups.places(layers), strict=True):
        group = groups.kv_cache_groups[place.group_idx]
        target = own.kv_sharing_target or own.name
        assert group.layer_names[place.row] == target


def test_a_layer_without_a_group_is_a_bug():
    groups = groups_of_layers((layer("0"), layer("1", 64)), block_size=16, dtype="float32")
    with pytest.raises(InvariantError, match=r"layers \['2'\] are in no KV cache group"):
        groups.places([layer("0"), layer("2")])
