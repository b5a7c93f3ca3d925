"""Events have vLLM's wire formats, and a router that follows them knows the prefix cache."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxkv.config.kv_events_config import KVEventsConfig
from paxkv.contracts.observation import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from paxkv.engine.kv_event_formats import WireFormat
from paxkv.kv_cache.hashing.block_hash import BlockHasher, get_block_hash, get_group_id
from paxkv.kv_cache.observers.event_recorder import KVEventRecorder
from paxkv.kv_cache.pool.block_pool import BlockPool
from tests.paxkv.engine.cached_blocks import SPECS, run_request
from tests.paxkv.engine.kv_event_structs import decode, follow

A, B = b"\x01" * 24 + (7).to_bytes(8, "big"), b"\x02" * 24 + (2**64 - 1).to_bytes(8, "big")


def stored(*block_hashes, parent=None, group_id=0, kind="full_attention", sliding_window=None):
    return BlockStored(
        block_hashes=list(block_hashes),
        parent_block_hash=parent,
        token_ids=list(range(2 * len(block_hashes))),
        block_size=2,
        lora_name=None,
        group_id=group_id,
        kind=kind,
        sliding_window=sliding_window,
    )


def removed(*block_hashes, group_id=0):
    return BlockRemoved(block_hashes=list(block_hashes), group_id=group_id)


def payload(wire_format, *events):
    """The bytes of a message, or None if subscribers need none."""
    batch = wire_format.convert(KVEventBatch(ts=1.5, events=list(events)))
    return None if batch is None else msgspec.msgpack.encode(batch)


def test_format_0_16_has_the_elements_of_vllm():
    wire_format = WireFormat(KVEventsConfig(data_parallel_rank=3))
    sent = payload(wire_format, stored(B, parent=A), removed(B), AllBlocksCleared())
    assert msgspec.msgpack.decode(sent) == [
        1.5,
        [
            ["BlockStored", [2**64 - 1], 7, [0, 1], 2, None, "GPU", None],
            ["BlockRemoved", [2**64 - 1], "GPU"],
            ["AllBlocksCleared"],
        ],
        3,
    ]
    first, second, third = decode(sent).events
    assert (first.block_hashes, first.parent_block_hash, first.token_ids) == (
        [2**64 - 1],
        7,
        [0, 1],
    )
    assert (first.block_size, first.lora_id, first.lora_name) == (2, None, None)
    assert first.medium == second.medium == "GPU"
    assert type(third).__name__ == "AllBlocksCleared016"


def test_format_0_32_has_maps_with_the_group():
    wire_format = WireFormat(KVEventsConfig(wire_format="vllm-0.32", block_hash_type="bytes"))
    in_group = stored(B, parent=A, group_id=1, kind="mla_attention")
    sent = payload(wire_format, in_group, removed(B), AllBlocksCleared())
    ts, events, rank = msgspec.msgpack.decode(sent)
    assert (ts, rank) == (1.5, 0)
    assert events == [
        {
            "type": "BlockStored",
            "block_hashes": [B],
            "parent_block_hash": A,
            "token_ids": [0, 1],
            "block_size": 2,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "group_idx": 1,
            "kv_cache_spec_kind": "mla_attention",
        },
        {"type": "BlockRemoved", "block_hashes": [B], "medium": "GPU", "group_idx": 0},
        {"type": "AllBlocksCleared"},
    ]
    first, second, third = decode(sent, "vllm-0.32").events
    assert (first.group_idx, second.group_idx) == (1, 0)
    assert type(third).__name__ == "AllBlocksCleared032"


def test_format_0_32_has_the_length_of_a_window():
    event = stored(A, kind="sliding_window", sliding_window=6)
    wire_format = WireFormat(KVEventsConfig(wire_format="vllm-0.32"))
    (sent,) = decode(payload(wire_format, event), "vllm-0.32").events
    assert (sent.kv_cache_spec_kind, sent.kv_cache_spec_sliding_window) == ("sliding_window", 6)


def test_stored_event_contains_the_lora_adapter():
    event = BlockStored(
        block_hashes=[A],
        parent_block_hash=None,
        token_ids=[1, 2],
        block_size=2,
        lora_name="sql",
        group_id=0,
        kind="full_attention",
        sliding_window=None,
    )
    (sent,) = decode(payload(WireFormat(KVEventsConfig()), event)).events
    assert (sent.lora_id, sent.lora_name) == (None, "sql")


def test_format_0_16_reports_removal_when_the_last_group_loses_the_hash():
    wire_format = WireFormat(KVEventsConfig(block_hash_type="bytes"))
    assert payload(wire_format, stored(A, B)) is not None
    assert payload(wire_format, stored(A, B, group_id=1)) is None
    assert payload(wire_format, removed(A, group_id=1)) is None
    (event,) = decode(payload(wire_format, removed(A, B, group_id=0))).events
    assert event.block_hashes == [A]
    # The cache was cleared, so the next group that stores B is the first again.
    payload(wire_format, AllBlocksCleared())
    assert payload(wire_format, stored(B, group_id=1)) is not None


@pytest.mark.parametrize("wire_format", ["vllm-0.16", "vllm-0.32"])
@pytest.mark.parametrize("hash_type", ["int", "bytes"])
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["run", "run", "run", "reset"]),
            st.lists(st.integers(0, 1), min_size=2, max_size=10),
            st.integers(0, 1),
        ),
        min_size=1,
        max_size=25,
    )
)
def test_a_router_that_follows_the_events_has_the_hashes_of_the_prefix_cache(
    wire_format, hash_type, steps
):
    """Two groups share one pool of 7 blocks, so blocks are evicted all the time."""
    recorder = KVEventRecorder(SPECS)
    pool = BlockPool(num_blocks=8, enable_caching=True, hash_block_size=2, observers=[recorder])
    hasher = BlockHasher(block_size=2, seed="s")
    converter = WireFormat(KVEventsConfig(wire_format=wire_format, block_hash_type=hash_type))
    known = set()
    for action, token_ids, group_id in steps:
        if action == "reset":
            assert pool.reset_prefix_cache()
        else:
            run_request(pool, hasher, token_ids, group_id)
        sent = payload(converter, *recorder.drain())
        if sent is not None:
            follow(known, decode(sent, wire_format))
        assert known == {
            (
                get_group_id(key) if wire_format == "vllm-0.32" else None,
                on_the_wire(get_block_hash(key), hash_type),
            )
            for key, _ in pool.cached_block_hash_to_block.items()
        }


def on_the_wire(block_hash, hash_type):
    return block_hash if hash_type == "bytes" else int.from_bytes(block_hash, "big") % 2**64
