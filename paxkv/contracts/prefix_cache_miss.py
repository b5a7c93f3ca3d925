"""PrefixCacheMiss: why the prefix cache had no more of a request's tokens."""

import dataclasses
from typing import Literal

# hit                  everything was found that can be: the last token is always computed
# disabled             caching is off, or the request asked not to read the cache
# too_short            the prompt has no full block before its last token
# evicted              the block was cached, and was forgotten to make room
# salt                 the first block is cached under another salt, or without one
# lora                 the first block is cached, but as another adapter, or none, computed it
# first_block_differs  nothing cached lately begins like this
# block_differs        what is cached ends, or goes on with other content, at `block_idx`
# shortened            the next block is cached, but a hit cannot end there: not at a boundary of
#                      all KV cache groups, or a sliding window lacks a block of its run
MissReason = Literal[
    "hit",
    "disabled",
    "too_short",
    "evicted",
    "salt",
    "lora",
    "first_block_differs",
    "block_differs",
    "shortened",
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCacheMiss:
    """The answer for one request.

    Args:
        num_tokens: Tokens that were looked up.
        num_hit_tokens: Those found, in [0, num_tokens - 1].
        block_idx: First block that was not found, counted in blocks of `block_size`; None where
            the reason is not of a block.
        block_size: Tokens in it, which is its KV cache group's block size; None without one.
    """

    request_id: str
    reason: MissReason
    num_tokens: int
    num_hit_tokens: int = 0
    block_idx: int | None = None
    block_size: int | None = None
