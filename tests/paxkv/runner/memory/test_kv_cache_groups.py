"""Caches of one kind form groups, and all groups' pages have the same bytes."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import AttentionFormat, CacheRef, DecoderSpec, LayerSpec
from models.cache.state_format import StateFormat
from paxkv.contracts.kv_cache_spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from paxkv.errors import ConfigError, InvariantError
from paxkv.runner.memory.kv_cache_groups import (
    agree_on_pages,
    cache_spec,
    group_layers,
    groups_of_spec,
    make_kv_cache_groups,
)
from paxkv.runner.shapes.program_shapes import TableShape
from tests.models.cache.formats_of_tests import IndexFormat


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


def state(*widths):
    return StateFormat(shapes=tuple((width,) for width in widths))


def attention(num_kv_heads=2, head_dim=32, *, dtype="bfloat16", **fields):
    return AttentionFormat(num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype, **fields)


def window(size, **fields):
    return attention(kind="window", sliding_window=size, **fields)


def layer(name, cache, owner=None):
    """A layer with one cache, `<name>.kv`, that it has itself or shares."""
    return LayerSpec(name=name, caches=(("kv", CacheRef(format=cache, owner=owner)),))


def groups_of(*layers, **settings):
    return groups_of_spec(DecoderSpec(layers=layers), **{"block_size": 16} | settings)


def names(groups):
    return [group.layer_names for group in groups.kv_cache_groups]


def test_a_block_has_its_tokens_on_each_rank_of_a_context():
    layers = [layer(str(i), attention(1)) for i in range(2)]
    alone, shared = groups_of(*layers), groups_of(*layers, num_context_ranks=4)
    (one,), (many,) = alone.kv_cache_groups, shared.kv_cache_groups
    assert one.kv_cache_spec.block_size == 16
    assert many.kv_cache_spec.block_size == 64
    assert many.kv_cache_spec.page_size_bytes == one.kv_cache_spec.page_size_bytes
    assert shared.formats == alone.formats
    assert [table.max_blocks_per_req for table in shared.tables(100)] == [2]
    with pytest.raises(ConfigError, match="positions of a cache of the kind 'sliding_window' yet"):
        groups_of(layer("0", window(64)), num_context_ranks=2)


def test_five_sliding_layers_per_full_layer_use_as_many_rows_as_full_layers():
    # Gemma 3's pattern, 12 layers: two full ones, so six groups of two.
    groups = groups_of(
        *(layer(str(i), attention() if i % 6 == 5 else window(64)) for i in range(12))
    )
    assert names(groups) == [
        ("0.kv", "6.kv"), ("1.kv", "7.kv"), ("2.kv", "8.kv"), ("3.kv", "9.kv"), ("4.kv", "10.kv"),
        ("5.kv", "11.kv"),
    ]  # fmt: skip
    specs = [group.kv_cache_spec for group in groups.kv_cache_groups]
    assert specs == [sliding(64)] * 5 + [full()]
    config = groups.config(num_blocks=7)
    assert (config.num_blocks, config.num_rows) == (7, 2)


def test_unified_layers_are_one_group_that_names_their_window():
    groups = groups_of(*(layer(str(i), attention(sliding_window=32)) for i in range(4)))
    assert names(groups) == [("0.kv", "1.kv", "2.kv", "3.kv")]
    spec = groups.kv_cache_groups[0].kv_cache_spec
    assert isinstance(spec, FullAttentionSpec) and spec.sliding_window == 32


def test_shared_cache_is_in_no_group():
    groups = groups_of(
        layer("0", attention()),
        layer("1", window(64)),
        layer("2", attention(), owner="0.kv"),
    )
    assert names(groups) == [("0.kv",), ("1.kv",)]
    assert groups.config(num_blocks=7).kv_sharing_targets == (("2.kv", "0.kv"),)
    assert groups.formats.keys() == {"0.kv", "1.kv"}


@pytest.mark.parametrize("target", ["nowhere", "1"])
def test_sharing_a_cache_without_pages_is_a_bug(target):
    with pytest.raises(InvariantError, match=f"got '{target}', expected one of"):
        make_kv_cache_groups({"0": full()}, kv_sharing_targets={"1": target})


def test_pages_of_two_sizes_are_a_bug():
    with pytest.raises(InvariantError, match=r"one size, got \[4096, 8192\]"):
        make_kv_cache_groups({"0": full(2), "1": full(4)})


def test_a_model_without_caches_is_refused():
    with pytest.raises(ConfigError, match="no layer of the model caches anything"):
        groups_of(LayerSpec(name="encoder"))


@given(
    st.lists(
        st.one_of(
            st.builds(attention, st.sampled_from([1, 2, 4, 8])),
            st.builds(window, st.sampled_from([32, 64]), num_kv_heads=st.sampled_from([1, 2, 4])),
            st.builds(state, st.integers(1, 5000)),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_any_mixture_of_layers_forms_groups_with_equal_pages(formats):
    groups = groups_of(*(layer(str(i), cache) for i, cache in enumerate(formats)))
    own = {f"{i}.kv": cache for i, cache in enumerate(formats)}
    assert sorted(n for names_of_one in names(groups) for n in names_of_one) == sorted(own)
    assert len({group.kv_cache_spec.page_size_bytes for group in groups.kv_cache_groups}) == 1
    for group in groups.kv_cache_groups:
        spec = group.kv_cache_spec
        for name in group.layer_names:
            assert isinstance(spec, MambaSpec) == (own[name].kind == "state")
            if own[name].kind == "state":
                num_bytes = own[name].content_bytes(spec.block_size)
                assert spec.blocks_per_state == -(-num_bytes // spec.page_size_bytes)
                continue
            assert spec.page_size_bytes >= own[name].page_bytes(spec.block_size)
            if own[name].kind == "window":
                assert spec.sliding_window == own[name].sliding_window


def grouped(kinds: str) -> list[str]:
    """Layer indices per group, "SSF" being two sliding layers and a full one."""
    groups = group_layers({str(idx): kind for idx, kind in enumerate(kinds)})
    return [" ".join(group) for group in groups]


def test_group_size_is_the_number_of_layers_of_the_rarest_kind():
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


# Windows, and half the KV heads: pages of the same bytes hold twice as many tokens.
FORMATS = (attention(), window(32), window(64), attention(1), window(32, num_kv_heads=1))


@given(st.lists(st.sampled_from(FORMATS), min_size=1, max_size=40), st.data())
def test_cache_has_the_group_and_row_of_its_name_or_of_its_owner(formats, data):
    layers = []
    for i, cache in enumerate(formats):
        own = [other for other in layers if other.caches[0][1].owner is None]
        shared = data.draw(st.sampled_from([None, *own[:2]]))
        if shared is None:
            layers.append(layer(str(i), cache))
        else:
            layers.append(layer(str(i), shared.caches[0][1].format, f"{shared.name}.kv"))
    groups = groups_of(*layers)
    # Tables are in the order of the groups, except that groups of one block size are together.
    tables = groups.tables(max_model_len=100)
    assert len({table.block_size for table in tables}) == len(tables)
    left = iter(groups.kv_cache_groups)
    by_inputs = [[next(left) for _ in range(table.num_groups)] for table in tables]
    assert next(left, None) is None
    places = groups.places(DecoderSpec(layers=tuple(layers)))
    for own, ((name, place),) in zip(layers, places, strict=True):
        group = by_inputs[place.inputs_idx][place.group_idx]
        assert name == "kv"
        full_name = own.caches[0][1].owner or f"{own.name}.kv"
        assert group.layer_names[place.row] == full_name
        assert place.format == groups.formats[full_name]
        table = tables[place.inputs_idx]
        assert table.block_size == group.kv_cache_spec.block_size
        assert table.max_blocks_per_req == -(-100 // table.block_size)


def test_a_cache_without_a_group_is_a_bug():
    groups = groups_of(layer("0", attention()), layer("1", window(64)))
    other = DecoderSpec(layers=(layer("0", attention()), layer("2", attention())))
    with pytest.raises(InvariantError, match=r"caches \['2.kv'\] are in no KV cache group"):
        groups.places(other)


def test_groups_of_a_block_size_have_one_array_of_block_tables():
    # Layers of two heads with a window and without, and between them layers of one head: blocks
    # twice as long.
    formats = [attention(), attention(1), window(64)] * 2
    layers = [layer(str(i), cache) for i, cache in enumerate(formats)]
    groups = groups_of(*layers)
    assert names(groups) == [("0.kv", "3.kv"), ("2.kv", "5.kv"), ("1.kv", "4.kv")]
    assert groups.tables(max_model_len=100) == (
        TableShape(num_groups=2, max_blocks_per_req=7, block_size=16),
        TableShape(num_groups=1, max_blocks_per_req=4, block_size=32),
    )
    places = groups.places(DecoderSpec(layers=tuple(layers)))
    found = [(p.inputs_idx, p.group_idx, p.row) for ((_, p),) in places]
    assert found == [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1)]


def test_a_state_has_block_tables_of_its_own():
    """An entry of its table is a state, and not the tokens of a block."""
    both = (
        ("kv", CacheRef(format=attention())),
        ("sum", CacheRef(format=state(64))),
    )
    spec = DecoderSpec(layers=tuple(LayerSpec(name=str(i), caches=both) for i in range(2)))
    groups = groups_of_spec(spec, block_size=16)
    assert names(groups) == [("0.kv", "1.kv"), ("0.sum", "1.sum")]
    assert groups.tables(100) == (
        TableShape(num_groups=1, max_blocks_per_req=7, block_size=16),
        TableShape(num_groups=1, max_blocks_per_req=1, block_size=16, is_state=True),
    )
    of_layer = dict(groups.places(spec)[1])
    assert {name: (p.inputs_idx, p.row) for name, p in of_layer.items()} == {
        "kv": (0, 1),
        "sum": (1, 1),
    }


def test_states_are_one_group_with_slots_of_several_parts():
    # 7 layers with states to 2 with attention: rows for 2, so a slot has 4 parts. An array of 9,000
    # bytes takes 3 pages of 4,096, and one of 400 bytes takes another.
    kinds = "SSSASSASS"
    caches = {"S": state(2250, 100), "A": attention()}
    layers = tuple(layer(str(i), caches[kind]) for i, kind in enumerate(kinds))
    groups = groups_of(*layers)
    assert names(groups) == [tuple(f"{i}.kv" for i in (0, 1, 2, 4, 5, 7, 8)), ("3.kv", "6.kv")]
    spec = groups.kv_cache_groups[0].kv_cache_spec
    assert spec == MambaSpec(
        block_size=16, page_bytes=4096, state_bytes=9400, blocks_per_state=4, num_parts=4
    )
    assert groups.config(2).num_rows == 2
    assert groups.tables(100)[0] == TableShape(
        num_groups=4, max_blocks_per_req=4, block_size=16, is_state=True
    )
    places = groups.places(DecoderSpec(layers=layers))
    found = [(p.inputs_idx, p.group_idx, p.row) for ((_, p),) in places]
    assert found == [
        (0, 0, 0), (0, 1, 0), (0, 2, 0), (1, 0, 0), (0, 3, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1),
        (0, 2, 1),
    ]  # fmt: skip
    assert groups.padded_shares["0.kv"] == 1 - 9400 / (4 * 4096)


def test_states_end_where_blocks_of_all_sizes_end():
    layers = (layer("0", attention(2)), layer("1", attention(1)), layer("2", state(8)))
    specs = [group.kv_cache_spec for group in groups_of(*layers).kv_cache_groups]
    assert [spec.block_size for spec in specs] == [16, 32, 32]


KIB = 2**10


def sizes(agreed):
    return {name: block_size for name, (_, block_size, _) in agreed.items()}


def test_smaller_pages_get_blocks_longer_by_a_power_of_two():
    # 64, 16 and 24 KiB at block size 16.
    formats = {"big": attention(8, 128), "small": attention(2, 128), "odd": attention(4, 96)}
    own_bytes = [cache.page_bytes(16) for cache in formats.values()]
    assert own_bytes == [64 * KIB, 16 * KIB, 24 * KIB]
    agreed = agree_on_pages(formats, 16)
    assert sizes(agreed) == {"big": 16, "small": 64, "odd": 32}
    assert {page_bytes for _, _, page_bytes in agreed.values()} == {64 * KIB}
    # 48 KiB of 64: each head of 96 has room for 128.
    wide = {name: cache.head_dim for name, (cache, _, _) in agreed.items()}
    assert wide == {"big": 128, "small": 128, "odd": 128}
    layers = [layer(name, cache) for name, cache in formats.items()]
    assert groups_of(*layers).padded_shares == {"odd.kv": 0.25}


def test_a_state_is_padded_to_a_page_and_its_block_size_is_that_of_the_largest():
    formats = {"kv": attention(2, 32), "sum": state(300)}
    agreed = agree_on_pages(formats, 16)
    assert agreed["kv"] == (formats["kv"], 16, 4 * KIB)
    assert agreed["sum"] == (formats["sum"], 16, 4 * KIB)
    layers = [layer(name, cache) for name, cache in formats.items()]
    groups = groups_of(*layers)
    assert groups.padded_shares == {"sum.kv": 1 - 1200 / 4096}
    assert {group.kv_cache_spec.page_size_bytes for group in groups.kv_cache_groups} == {4096}


def test_states_alone_have_pages_of_the_largest_state():
    # In steps of 512 bytes.
    agreed = agree_on_pages({"a": state(10), "b": state(130)}, 16)
    assert [page_bytes for _, _, page_bytes in agreed.values()] == [1024, 1024]
    assert groups_of(layer("a", state(128))).padded_shares == {}


def test_a_single_cache_is_not_changed():
    cache = attention(3, 20, dtype="float32")
    assert agree_on_pages({"a": cache}, 16) == {"a": (cache, 16, 2 * 3 * 16 * 20 * 4)}
    assert groups_of(layer("a", cache)).padded_shares == {}


def test_heads_are_as_wide_as_the_platform_stores_them():
    groups = groups_of(layer("a", attention(2, 96)), head_dim_step=128)
    assert groups.formats["a.kv"].head_dim == 128
    assert groups.kv_cache_groups[0].kv_cache_spec.head_size == 128
    # The platform causes the padding, which is reported too.
    assert groups.padded_shares == {"a.kv": 0.25}


def test_values_narrower_than_keys_are_padding():
    # A key of 192 and a value of 128, each stored as 192.
    cache = dataclasses.replace(attention(4, 192), content_dim=192 + 128)
    assert groups_of(layer("a", cache)).padded_shares == {"a.kv": pytest.approx(1 / 6)}


def test_heads_that_would_fill_a_page_at_a_width_the_platform_cannot_store_are_refused():
    layers = (layer("six", attention(6, 128)), layer("four", attention(4, 128)))
    assert groups_of(*layers, head_dim_step=64).formats["four.kv"].head_dim == 192
    with pytest.raises(ConfigError, match=r"'four\.kv' .*head_dim=192.* multiples of 128"):
        groups_of(*layers, head_dim_step=128)


@pytest.mark.parametrize(
    ("formats", "message"),
    [
        # 3 heads of 128 in a page of 4: 170.67 numbers each.
        (
            {"four": attention(4, 128), "three": attention(3, 128)},
            r"'three' cannot have .* got 24576 bytes for a block of 16 tokens, and pages of "
            "32768.*kv_cache_dtype",
        ),
        # 2 heads of 10 in a page of 2 heads of 12: the wider ones would be no multiple of 8.
        ({"a": attention(2, 12), "b": attention(2, 10)}, "'b' cannot have"),
    ],
)
def test_caches_that_fit_no_common_page_are_refused_by_name(formats, message):
    with pytest.raises(ConfigError, match=message):
        agree_on_pages(formats, 16)


@settings(max_examples=100)
@given(
    st.lists(
        st.one_of(
            st.builds(
                attention,
                st.sampled_from([1, 2, 3, 4, 8, 16]),
                st.sampled_from([8, 16, 64, 80, 96, 128, 256]),
                dtype=st.sampled_from(["bfloat16", "float32"]),
            ),
            st.builds(IndexFormat, width=st.integers(1, 600), dtype=st.sampled_from(["bfloat16"])),
            st.builds(state, st.integers(1, 5000)),
        ),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([8, 16, 32]),
)
def test_any_caches_agree_on_pages_or_one_of_them_fits_none(formats, block_size):
    by_name = {str(i): cache for i, cache in enumerate(formats)}
    own_bytes = {name: cache.page_bytes(block_size) for name, cache in by_name.items()}
    of_tokens = [own_bytes[name] for name, cache in by_name.items() if cache.kind != "state"]
    page_bytes = max(of_tokens or own_bytes.values())
    try:
        agreed = agree_on_pages(by_name, block_size)
    except ConfigError as error:
        name = str(error).split("'")[1]
        assert not fits(by_name[name], page_bytes, block_size)
        return
    assert agreed.keys() == by_name.keys()
    for name, (wide, size, agreed_bytes) in agreed.items():
        own = by_name[name]
        assert agreed_bytes == page_bytes
        if own.kind == "state":
            assert wide == own
            assert all(size % other == 0 for _, other, _ in agreed.values())
            continue
        assert wide.page_bytes(size) == page_bytes
        # A power of two times the block size, and no larger one would do.
        assert size % block_size == 0 and (size // block_size).bit_count() == 1
        assert not fits(own, page_bytes, 2 * size)
        field = "head_dim" if isinstance(own, AttentionFormat) else "width"
        assert getattr(wide, field) >= getattr(own, field)
        kept = {field: getattr(own, field)}
        assert dataclasses.replace(wide, **kept) == own


def fits(cache, page_bytes, block_size):
    """Whether some width makes pages of these bytes, for blocks of this size or larger ones."""
    sizes = []
    while cache.page_bytes(block_size << len(sizes)) <= page_bytes:
        sizes.append(block_size << len(sizes))
    return any(fits_blocks(cache, page_bytes, size) for size in sizes)


def fits_blocks(cache, page_bytes, size):
    """Whether some width, tried one after the other, makes pages of these bytes."""
    if isinstance(cache, IndexFormat):
        return any(2 * width * size == page_bytes for width in range(cache.width, 40_000))
    itemsize = {"bfloat16": 2, "float32": 4}[cache.dtype]
    bytes_per_dim = 2 * cache.num_kv_heads * size * itemsize
    widths = [cache.head_dim, *range(8, 40_000, 8)]
    return any(bytes_per_dim * w == page_bytes for w in widths if w >= cache.head_dim)


def test_each_kind_of_cache_has_its_kind_of_spec():
    assert cache_spec(attention(), 16, 4096) == full()
    assert cache_spec(attention(sliding_window=64), 16, 4096) == full(sliding_window=64)
    assert cache_spec(attention(chunk_size=64), 16, 4096) == full(attention_chunk_size=64)
    assert cache_spec(window(64), 16, 4096) == sliding(64)
    chunked = ChunkedLocalAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=32, dtype="bfloat16", attention_chunk_size=64
    )
    assert cache_spec(attention(kind="chunk", chunk_size=64), 16, 4096) == chunked
    for kind in ("latent", "index"):
        vectors = IndexFormat(width=96, dtype="bfloat16", kind=kind)
        spec = cache_spec(vectors, 16, 4096)
        assert isinstance(spec, MLAAttentionSpec) and spec.block_size == 16
        assert (spec.head_size, spec.dtype) == (96, "bfloat16")
        assert (spec.real_page_size_bytes, spec.page_size_bytes) == (96 * 2 * 16, 4096)
    assert cache_spec(state(75), 64, 512) == MambaSpec(
        block_size=64, page_bytes=512, state_bytes=300, blocks_per_state=1
    )
    cross = IndexFormat(width=96, dtype="bfloat16", kind="cross")
    with pytest.raises(ConfigError, match="kind 'cross' are not supported yet"):
        cache_spec(cross, 16, 4096)
