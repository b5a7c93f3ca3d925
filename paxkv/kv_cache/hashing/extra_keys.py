"""Extra keys: the parts of a block hash besides tokens, such as the LoRA adapter and the salt."""

import dataclasses
from itertools import takewhile

from paxkv.contracts.engine_request import EngineRequest, MultiModalFeature

# A key begins with its kind: ("lora", name), ("mm", identifier, offset) or ("salt", salt).
# The kind distinguishes salt "a" from LoRA "a".
ExtraKey = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExtraKeySources:
    """The fields of an `EngineRequest` from which extra keys are made."""

    lora_name: str | None = None
    cache_salt: str | None = None
    mm_features: tuple[MultiModalFeature, ...] = ()

    def block_keys(
        self, block_size: int, start: int, num_blocks: int
    ) -> list[tuple[ExtraKey, ...]]:
        """The keys of consecutive blocks, for each block in the order LoRA, mm, salt.

        Blocks without an item or salt share one tuple object, so that it is encoded only once.

        Args:
            start: Token position at which the first block begins.
        """
        lora_keys: tuple[ExtraKey, ...] = ()
        if self.lora_name is not None:
            lora_keys = (("lora", self.lora_name),)
        keys = [lora_keys] * num_blocks
        num_own_blocks = min(num_blocks, -(-(self._own_end() - start) // block_size))
        item_idx = 0
        for block_idx in range(num_own_blocks):
            block_start = start + block_idx * block_size
            while (
                item_idx < len(self.mm_features) and _end(self.mm_features[item_idx]) <= block_start
            ):
                item_idx += 1
            own_keys = self._own_keys(block_start, block_start + block_size, item_idx)
            keys[block_idx] = lora_keys + own_keys
        return keys

    def _own_keys(self, start: int, end: int, item_idx: int) -> tuple[ExtraKey, ...]:
        """Item and salt keys of a block; `item_idx` is the first item that ends in it or later."""
        keys: list[ExtraKey] = [
            # The offset is relative to the block, and negative if the item began in an earlier
            # block.
            ("mm", item.identifier, item.offset - start)
            for item in takewhile(lambda item: item.offset < end, self.mm_features[item_idx:])
        ]
        # Hashes of later blocks contain the salt through the hash of the first block.
        if self.cache_salt is not None and start == 0:
            keys.append(("salt", self.cache_salt))
        return tuple(keys)

    def _own_end(self) -> int:
        """Blocks that start at this position or later have no item or salt key."""
        salt_end = 0 if self.cache_salt is None else 1
        mm_end = _end(self.mm_features[-1]) if self.mm_features else 0
        return max(salt_end, mm_end)


def _end(item: MultiModalFeature) -> int:
    return item.offset + item.length


def extra_key_sources(request: EngineRequest) -> ExtraKeySources | None:
    """The sources of a request's extra keys; None if it has none, which is usual."""
    if request.lora_name is None and request.cache_salt is None and not request.mm_features:
        return None
    return ExtraKeySources(
        lora_name=request.lora_name,
        cache_salt=request.cache_salt,
        mm_features=request.mm_features,
    )
