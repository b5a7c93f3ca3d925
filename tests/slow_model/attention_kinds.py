"""Definitions of what each kind of attention reads: which earlier tokens a token attends to.

Everything else follows from this: which blocks a prefix hit needs, which blocks a request may
free, and how many blocks it needs.
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
    if kind.name == "state":
        return max(0, position - 1)
    return 0


def blocks_to_continue(kind, length):
    """Indices of the blocks needed before `length` to compute the tokens from `length` on.

    A later token reads nothing before `length` that the token at `length` does not read.
    """
    return {pos // kind.block_size for pos in range(first_visible(kind, length), length)}


def num_skipped_blocks(kind, length):
    """Number of leading blocks that no token from `length` on reads."""
    return first_visible(kind, length) // kind.block_size


def is_hit(kind, length, is_cached):
    """Whether a prefix of `length` tokens can be reused from the cache.

    Args:
        is_cached: Block index -> whether a block with that content is in the cache.
    """
    return all(is_cached(i) for i in blocks_to_continue(kind, length))


def is_eagle_hit(kind, length, is_cached):
    """The same with a drafter that needs the tokens of the last hit block computed again.

    The block after the prefix is cached too, but is dropped from the hit.
    """
    return is_hit(kind, length, is_cached) and is_cached(length // kind.block_size)


def longest_hit(kinds, max_length, is_cached, *, use_eagle=False, step=1):
    """The longest prefix that every group can reuse, found by trying every length from the top.

    Args:
        is_cached: (group, block index) -> whether such a block is in the cache.
        step: Divides the length, as do the block sizes of all kinds.
    """
    step = math.lcm(step, *(kind.block_size for kind in kinds))
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
