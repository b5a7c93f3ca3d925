"""Extra keys: the keys of each block, and their order."""

from hypothesis import given
from hypothesis import strategies as st

from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.engine_request import EngineRequest, MultiModalFeature
from paxkv.kv_cache.hashing.extra_keys import ExtraKeySources, extra_key_sources


def item(identifier, offset, length):
    return MultiModalFeature(identifier=identifier, offset=offset, length=length)


def test_a_request_without_extra_keys_has_no_sources():
    request = EngineRequest(
        request_id="r", prompt_token_ids=[1], sampling_params=SamplingParams(max_tokens=1)
    )
    assert extra_key_sources(request) is None


def test_sources_contain_every_field_of_the_request():
    fields = {
        "cache_salt": "",
        "lora_name": "l",
        "mm_features": (item("i", 0, 1),),
    }
    for name, value in fields.items():
        request = EngineRequest(
            request_id="r",
            prompt_token_ids=[1],
            sampling_params=SamplingParams(max_tokens=1),
            **{name: value},
        )
        assert extra_key_sources(request) == ExtraKeySources(**{name: value})


def test_keys_come_in_the_order_lora_items_salt():
    sources = ExtraKeySources(
        lora_name="l",
        cache_salt="s",
        mm_features=(item("i", 1, 2), item("j", 3, 1)),
    )
    assert sources.block_keys(4, 0, 1) == [
        (("lora", "l"), ("mm", "i", 1), ("mm", "j", 3), ("salt", "s"))
    ]


def test_salt_is_a_key_of_the_first_block_and_lora_of_every_block():
    lora, salt = ("lora", "l"), ("salt", "s")
    sources = ExtraKeySources(lora_name="l", cache_salt="s")
    assert sources.block_keys(4, 0, 3) == [(lora, salt), (lora,), (lora,)]
    assert sources.block_keys(4, 8, 1) == [(lora,)]
    assert ExtraKeySources(cache_salt="s").block_keys(4, 4, 2) == [(), ()]
    with_item = ExtraKeySources(cache_salt="s", mm_features=(item("i", 0, 8),))
    assert with_item.block_keys(4, 0, 2) == [(("mm", "i", 0), salt), (("mm", "i", -4),)]


def test_an_item_is_a_key_of_each_block_it_overlaps_with_its_offset():
    # Positions 2..9 and 11 are in blocks 0, 1 and 2 of 4 tokens.
    sources = ExtraKeySources(mm_features=(item("i", 2, 8), item("j", 11, 1)))
    assert sources.block_keys(4, 0, 4) == [
        (("mm", "i", 2),),
        (("mm", "i", -2),),
        (("mm", "i", -6), ("mm", "j", 3)),
        (),
    ]
    # The block that begins at its end has no key.
    assert ExtraKeySources(mm_features=(item("i", 0, 4),)).block_keys(4, 4, 1) == [()]


def test_an_item_at_the_same_offset_of_another_block_has_the_same_key():
    early = ExtraKeySources(mm_features=(item("i", 1, 2),)).block_keys(4, 0, 3)
    late = ExtraKeySources(mm_features=(item("i", 9, 2),)).block_keys(4, 0, 3)
    assert early[0] == late[2]


@given(
    gaps=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 7)), max_size=5),
    start_block=st.integers(0, 6),
    num_blocks=st.integers(0, 6),
    block_size=st.integers(1, 5),
)
def test_item_keys_equal_a_search_over_all_positions(gaps, start_block, num_blocks, block_size):
    items, position = [], 0
    for gap, length in gaps:
        items.append(item(f"i{position}", position + gap, length))
        position += gap + length
    sources = ExtraKeySources(mm_features=tuple(items), lora_name="l")
    expected = []
    for block_idx in range(start_block, start_block + num_blocks):
        start = block_idx * block_size
        keys = [("lora", "l")]
        for mm in items:
            covered = set(range(mm.offset, mm.offset + mm.length))
            if covered & set(range(start, start + block_size)):
                keys.append(("mm", mm.identifier, mm.offset - start))
        expected.append(tuple(keys))
    assert sources.block_keys(block_size, start_block * block_size, num_blocks) == expected
