"""KV cache events in the wire formats of vLLM 0.16 and 0.32, field by field."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from paxkv.config.engine_config import KVBlockHashType, KVEventsConfig
from paxkv.contracts.observation import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVEventBatch,
)

# vLLM's name for the cache in the device's memory. paxkv has no other one.
_MEDIUM = "GPU"
# As vLLM shortens hashes that it sends as integers.
_INT_HASH_BYTES = 8

WireHash = bytes | int


class _ArrayEvent(msgspec.Struct, array_like=True, omit_defaults=True, tag=True, frozen=True):
    """Base of 0.16's events: an array with the class name in front."""


class _ArrayBlockStored(_ArrayEvent, frozen=True, tag="BlockStored"):
    block_hashes: list[WireHash]
    parent_block_hash: WireHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class _ArrayBlockRemoved(_ArrayEvent, frozen=True, tag="BlockRemoved"):
    block_hashes: list[WireHash]
    medium: str | None


class _ArrayAllBlocksCleared(_ArrayEvent, frozen=True, tag="AllBlocksCleared"):
    pass


class _MapEvent(msgspec.Struct, omit_defaults=True, tag=True, frozen=True):
    """Base of 0.32's events: a map with the class name under `type`."""


class _MapBlockStored(_MapEvent, frozen=True, tag="BlockStored"):
    block_hashes: list[WireHash]
    parent_block_hash: WireHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    group_idx: int | None = None


class _MapBlockRemoved(_MapEvent, frozen=True, tag="BlockRemoved"):
    block_hashes: list[WireHash]
    medium: str | None
    group_idx: int | None = None


class _MapAllBlocksCleared(_MapEvent, frozen=True, tag="AllBlocksCleared"):
    pass


class WireBatch(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """The payload of one message, in both formats; msgpack of it is what subscribers decode."""

    ts: float
    events: list[_ArrayEvent | _MapEvent]
    data_parallel_rank: int | None = None


class WireEvents(Protocol):
    """Turns recorded events into those of one wire format."""

    def convert(self, event: KVCacheEvent) -> _ArrayEvent | _MapEvent | None:
        """The event for subscribers; None if they need none."""
        ...


class WireFormat:
    """Turns each step's events into the configured format.

    `convert` must see every batch, also one that is dropped later: see `_UngroupedEvents`.
    """

    def __init__(self, config: KVEventsConfig) -> None:
        events_class = _EVENTS_CLASSES[config.wire_format]
        self._events: WireEvents = events_class(config.block_hash_type)
        self._data_parallel_rank = config.data_parallel_rank

    def convert(self, batch: KVEventBatch) -> WireBatch | None:
        """The batch for subscribers; None if it has no event for them."""
        converted = [self._events.convert(event) for event in batch.events]
        events = [event for event in converted if event is not None]
        if not events:
            return None
        return WireBatch(ts=batch.ts, events=events, data_parallel_rank=self._data_parallel_rank)


class _UngroupedEvents:
    """0.16's events, which cannot name a KV cache group.

    A hash is stored when the first group has it, and removed when no group has it any more. So a
    subscriber's set of hashes is what any group can find.
    """

    def __init__(self, hash_type: KVBlockHashType) -> None:
        self._hash_type: KVBlockHashType = hash_type
        # Bit i is set if group i has the hash.
        self._groups: dict[WireHash, int] = {}

    def convert(self, event: KVCacheEvent) -> _ArrayEvent | None:
        """The event of 0.16; None if another group had, or still has, all of its hashes."""
        if isinstance(event, AllBlocksCleared):
            self._groups.clear()
            return _ArrayAllBlocksCleared()
        block_hashes = _wire_hashes(event.block_hashes, self._hash_type)
        group_bit = 1 << event.group_id
        if isinstance(event, BlockRemoved):
            removed = [wire for wire in block_hashes if self._is_last(wire, group_bit)]
            return _ArrayBlockRemoved(block_hashes=removed, medium=_MEDIUM) if removed else None
        is_new = False
        for wire in block_hashes:
            groups = self._groups.get(wire, 0)
            is_new = is_new or not groups
            self._groups[wire] = groups | group_bit
        # Storing a hash again changes no set, so an event that is partly new is sent whole.
        return _ArrayBlockStored(**_stored_fields(event, self._hash_type)) if is_new else None

    def _is_last(self, wire: WireHash, group_bit: int) -> bool:
        groups = self._groups.pop(wire, 0) & ~group_bit
        if groups:
            self._groups[wire] = groups
        return not groups


class _GroupedEvents:
    """0.32's events, each of one KV cache group."""

    def __init__(self, hash_type: KVBlockHashType) -> None:
        self._hash_type: KVBlockHashType = hash_type

    def convert(self, event: KVCacheEvent) -> _MapEvent:
        """The event of 0.32."""
        if isinstance(event, AllBlocksCleared):
            return _MapAllBlocksCleared()
        if isinstance(event, BlockStored):
            fields = _stored_fields(event, self._hash_type)
            return _MapBlockStored(**fields, group_idx=event.group_id)
        return _MapBlockRemoved(
            block_hashes=_wire_hashes(event.block_hashes, self._hash_type),
            medium=_MEDIUM,
            group_idx=event.group_id,
        )


_EVENTS_CLASSES = {"vllm-0.16": _UngroupedEvents, "vllm-0.32": _GroupedEvents}


def _stored_fields(event: BlockStored, hash_type: KVBlockHashType) -> dict[str, object]:
    """The fields that both formats have."""
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
