"""KV events as a router for vLLM 0.16 or 0.32 decodes them."""

import msgspec


class Event016(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    pass


class BlockStored016(Event016, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved016(Event016, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None


class AllBlocksCleared016(Event016, tag="AllBlocksCleared"):
    pass


class Batch016(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored016 | BlockRemoved016 | AllBlocksCleared016]
    data_parallel_rank: int | None = None


class Event032(msgspec.Struct, omit_defaults=True, tag=True):
    pass


class BlockStored032(Event032, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved032(Event032, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared032(Event032, tag="AllBlocksCleared"):
    pass


class Batch032(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored032 | BlockRemoved032 | AllBlocksCleared032]
    data_parallel_rank: int | None = None


BATCH_TYPES = {"vllm-0.16": Batch016, "vllm-0.32": Batch032}


def decode(payload, wire_format="vllm-0.16"):
    return msgspec.msgpack.decode(payload, type=BATCH_TYPES[wire_format])


def follow(known, batch):
    """Updates a router's set `known` of (group index or None, hash) with a batch."""
    for event in batch.events:
        if isinstance(event, AllBlocksCleared016 | AllBlocksCleared032):
            known.clear()
            continue
        keys = {(getattr(event, "group_idx", None), wire) for wire in event.block_hashes}
        if isinstance(event, BlockStored016 | BlockStored032):
            known |= keys
        else:
            known -= keys
