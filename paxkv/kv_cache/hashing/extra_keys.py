"""Extra keys: what a block's K and V depend on, or are kept apart by, besides its tokens."""

import dataclasses
from itertools import takewhile

from paxkv.contracts.engine_request import EngineRequest, MultiModalFeature

# The kind of key, then its values: ("lora", name), ("mm", identifier, offset) or ("salt", salt).
# The kind keeps salt "a" and LoRA "a" apart.
ExtraKey = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExtraKeySources:
    """The parts of a request that make extra keys; fields are those of `EngineRequest`."""

    lora_name: str | None = None
    cache_salt: str | None = None
    mm_features: tuple[MultiModalFeature, ...] = ()

    def block_keys(
        self, block_size: int, start: int, num_blocks: int
    ) -> list[tuple[ExtraKey, ...]]:
        """The keys of consecutive blocks, each block's in the order LoRA, mm, salt.

        Blocks without a key of their own share one tuple object, so that it is encoded once.

        Args:
            start: Token position where the first of the blocks begins.
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
        """Keys of one block alone; `item_idx` is the first item that ends in it or later."""
        keys: list[ExtraKey] = [
            # Relative to the block: the same image elsewhere in the prompt is the same content.
            # Negative where it began in an earlier block.
            ("mm", item.identifier, item.offset - start)
            for item in takewhile(lambda item: item.offset < end, self.mm_features[item_idx:])
        ]
        # The chain carries it into every later block.
        if self.cache_salt is not None and start == 0:
            keys.append(("salt", self.cache_salt))
        return tuple(keys)

    def _own_end(self) -> int:
        """First position from which on a block has no key of its own."""
        salt_end = 0 if self.cache_salt is None else 1
        mm_end = _end(self.mm_features[-1]) if self.mm_features else 0
        return max(salt_end, mm_end)


def _end(item: MultiModalFeature) -> int:
    return item.offset + item.length


def extra_key_sources(request: EngineRequest) -> ExtraKeySources | None:
    """The sources of a request's extra keys; None for the many that have none."""
    if request.lora_name is None and request.cache_salt is None and not request.mm_features:
        return None
    return ExtraKeySources(
        lora_name=request.lora_name,
        cache_salt=request.cache_salt,
        mm_features=request.mm_features,
    )
