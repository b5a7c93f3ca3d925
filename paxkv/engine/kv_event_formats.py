"""KV cache events in the wire formats of vLLM 0.16 and 0.32."""

from collections.abc import Sequence

import msgspec

from paxkv.config.kv_events_config import KVBlockHashType, KVEventsConfig
from paxkv.contracts.observation import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVEventBatch,
)

# vLLM's name for the cache in the memory of the device, which is the only cache of paxkv.
_MEDIUM = "GPU"
# vLLM sends this many bytes of a hash as an integer.
_INT_HASH_BYTES = 8

WireHash = bytes | int


# An event of 0.16 is an array that begins with the name of its type. An event of 0.32 is a map with
# the name as "type".
WireEvent = list[object] | dict[str, object]


class WireBatch(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """The payload of one message, in both formats. Subscribers decode its msgpack."""

    ts: float
    events: list[WireEvent]
    data_parallel_rank: int | None = None


class WireFormat:
    """Converts the events of each step to the configured format.

    `convert` must be called with each batch, even if it is dropped later. See `_UngroupedEvents`.
    """

    def __init__(self, config: KVEventsConfig) -> None:
        events_class = _EVENTS_CLASSES[config.wire_format]
        self._events = events_class(config.block_hash_type)
        self._data_parallel_rank = config.data_parallel_rank

    def convert(self, batch: KVEventBatch) -> WireBatch | None:
        """Returns the batch for subscribers; None if it has no event for them."""
        converted = [self._events.convert(event) for event in batch.events]
        events = [event for event in converted if event is not None]
        if not events:
            return None
        return WireBatch(ts=batch.ts, events=events, data_parallel_rank=self._data_parallel_rank)


class _UngroupedEvents:
    """Converts to events of 0.16, which cannot name a KV cache group.

    Subscribers learn that a hash is stored when the first group has it, and that it is removed when
    no group has it any more. So their set of hashes has every hash that some group can find.
    """

    def __init__(self, hash_type: KVBlockHashType) -> None:
        self._hash_type: KVBlockHashType = hash_type
        # Bit i is set if group i has the hash.
        self._groups: dict[WireHash, int] = {}

    def convert(self, event: KVCacheEvent) -> WireEvent | None:
        """Returns None if the event changes nothing, because other groups have all its hashes."""
        if isinstance(event, AllBlocksCleared):
            self._groups.clear()
            return ["AllBlocksCleared"]
        block_hashes = _wire_hashes(event.block_hashes, self._hash_type)
        group_bit = 1 << event.group_id
        if isinstance(event, BlockRemoved):
            removed = [wire for wire in block_hashes if self._is_last(wire, group_bit)]
            return ["BlockRemoved", removed, _MEDIUM] if removed else None
        is_new = False
        for wire in block_hashes:
            groups = self._groups.get(wire, 0)
            is_new = is_new or not groups
            self._groups[wire] = groups | group_bit
        # An event with a new hash is sent whole. Its other hashes do not change subscribers' sets.
        fields = _stored_fields(event, self._hash_type)
        return ["BlockStored", *fields.values()] if is_new else None

    def _is_last(self, wire: WireHash, group_bit: int) -> bool:
        groups = self._groups.pop(wire, 0) & ~group_bit
        if groups:
            self._groups[wire] = groups
        return not groups


class _GroupedEvents:
    """Converts to events of 0.32, each of one KV cache group."""

    def __init__(self, hash_type: KVBlockHashType) -> None:
        self._hash_type: KVBlockHashType = hash_type

    def convert(self, event: KVCacheEvent) -> WireEvent:
        if isinstance(event, AllBlocksCleared):
            return {"type": "AllBlocksCleared"}
        if isinstance(event, BlockStored):
            fields = _stored_fields(event, self._hash_type) | {
                "group_idx": event.group_id,
                "kv_cache_spec_kind": event.kind,
            }
            if event.sliding_window is not None:
                fields["kv_cache_spec_sliding_window"] = event.sliding_window
            return {"type": "BlockStored", **fields}
        return {
            "type": "BlockRemoved",
            "block_hashes": _wire_hashes(event.block_hashes, self._hash_type),
            "medium": _MEDIUM,
            "group_idx": event.group_id,
        }


_EVENTS_CLASSES = {"vllm-0.16": _UngroupedEvents, "vllm-0.32": _GroupedEvents}


def _stored_fields(event: BlockStored, hash_type: KVBlockHashType) -> dict[str, object]:
    """Returns the fields that both formats have, in the order of 0.16."""
    parent = event.parent_block_hash
    return {
        "block_hashes": _wire_hashes(event.block_hashes, hash_type),
        "parent_block_hash": None if parent is None else _wire_hashes([parent], hash_type)[0],
        "token_ids": event.token_ids,
        "block_size": event.block_size,
        "lora_id": None,
        "medium": _MEDIUM,
        "lora_name": event.lora_name,
    }


def _wire_hashes(block_hashes: Sequence[bytes], hash_type: KVBlockHashType) -> list[WireHash]:
    if hash_type == "bytes":
        return list(block_hashes)
    return [int.from_bytes(block_hash[-_INT_HASH_BYTES:], "big") for block_hash in block_hashes]
