"""What each kind of attention reads, as definitions: which earlier tokens a token sees.

Everything else about a kind follows from this: which blocks a prefix hit must have, which blocks
a request may give up, which blocks it needs.
"""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Kind:
    """One KV cache group's kind: "full", "window", "chunk", "state", "cross" or "sink".

    Args:
        size: Window, chunk, number of sink positions, or blocks of a slot; unused by the others.
    """

    name: str
    block_size: int
    size: int = 0

    @property
    def holds_tokens(self):
        """Whether block i of a table holds the decoder's tokens from `i * block_size` on."""
        return self.name not in ("state", "cross")


def first_visible(kind, position):
    """First earlier position whose keys and values (or state) the token at `position` reads."""
    if kind.name == "window":
        return max(0, position - kind.size + 1)
    if kind.name == "chunk":
        return position // kind.size * kind.size
    return 0


def blocks_to_continue(kind, length):
    """Indices of the blocks that must be there when the tokens from `length` on are computed.

    A later token sees nothing before `length` that the token at `length` does not see.
    """
    return {pos // kind.block_size for pos in range(first_visible(kind, length), length)}


def num_blocks_left_behind(kind, length):
    """Leading blocks that no token from `length` on reads."""
    return first_visible(kind, length) // kind.block_size


def is_hit(kind, length, is_cached):
    """Whether a prefix of `length` tokens can be taken over from the cache.

    Args:
        is_cached: Block index -> whether a block with that content can be found.
    """
    return all(is_cached(i) for i in blocks_to_continue(kind, length))


def is_eagle_hit(kind, length, is_cached):
    """The same where the drafter needs the last block's tokens computed once more.

    The block behind the prefix was hit too, and dropped.
    """
    return is_hit(kind, length, is_cached) and is_cached(length // kind.block_size)


def longest_hit(kinds, max_length, is_cached, *, use_eagle=False):
    """Most tokens that every group can take over, by trying every length from the top.

    Args:
        is_cached: (group, block index) -> whether such a block can be found.
    """
    step = math.lcm(*(kind.block_size for kind in kinds))
    for length in range(max_length // step * step, 0, -step):
        if use_eagle and any(length + kind.block_size > max_length for kind in kinds):
            continue
        test = is_eagle_hit if use_eagle else is_hit
        if all(
            test(kind, length, lambda i, group=group: is_cached(group, i))
            for group, kind in enumerate(kinds)
        ):
            return length
    return 0
