"""KV cache events: which blocks can be found by hash, for whoever routes requests."""

import msgspec

# A set to which the hashes of `BlockStored` are added, and from which those of `BlockRemoved` are
# taken, is what can be found: content that lies in several blocks is stored once, and removed with
# the last of them.


class KVCacheEvent(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Base of all events; on the wire an array with the class name in front."""


class BlockStored(KVCacheEvent, frozen=True):
    """Consecutive blocks of one request became findable.

    Args:
        block_hashes: Of the blocks, in order; without group id.
        parent_block_hash: Of the block before the first; None at the start of a prompt. The block
            itself may be gone.
        token_ids: Tokens in all of them.
        block_size: Tokens a block.
        lora_name: Adapter that they were computed with.
        group_id: KV cache group.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_name: str | None
    group_id: int


class BlockRemoved(KVCacheEvent, frozen=True):
    """Hashes that no block has any more: its memory was handed out again, or it was withdrawn.

    A block that is only freed stays findable.
    """

    block_hashes: list[bytes]
    group_id: int


class AllBlocksCleared(KVCacheEvent, frozen=True):
    """Nothing can be found any more."""


class KVEventBatch(msgspec.Struct, array_like=True, frozen=True):
    """Events of one step.

    Args:
        ts: Seconds since the epoch.
    """

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
