"""Buckets: the only file where the shapes that reach `jit` come from."""

import bisect
import dataclasses

from paxkv.errors import InvariantError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Every dimension of one compiled step; dimension names as in `models/forward_batch.py`."""

    num_tokens: int
    num_reqs: int
    num_logits: int
    num_groups: int
    max_blocks_per_req: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CopyShape:
    """The dimension of one compiled program that copies blocks."""

    num_copies: int


# Between a single token and this there is no bucket: on the CPU the demo model decodes 1 request as
# one of 8 in 1.4 times the time, and every bucket is a program to compile before the start.
MIN_BATCHED_TOKENS = 8


def token_buckets(max_num_batched_tokens: int) -> tuple[int, ...]:
    """Padded token counts: one, powers of two from 8 on, and the largest step exactly.

    Example: 48 -> (1, 8, 16, 32, 48). From 5 tokens on, at most half of a step is padding.
    """
    counts = [1]
    num_tokens = MIN_BATCHED_TOKENS
    while num_tokens < max_num_batched_tokens:
        counts.append(num_tokens)
        num_tokens *= 2
    return tuple(sorted({*counts, max_num_batched_tokens}))


# Block copies come with forks, a few at a time: three programs serve up to 512 of them.
MIN_COPIES = 8
COPIES_GROWTH = 8


def copy_buckets(max_num_copies: int) -> tuple[int, ...]:
    """Padded numbers of block copies; the largest is exact. Example: 100 -> (8, 64, 100)."""
    counts = []
    num_copies = MIN_COPIES
    while num_copies < max_num_copies:
        counts.append(num_copies)
        num_copies *= COPIES_GROWTH
    return (*counts, max_num_copies)


class StepBuckets:
    """The shapes of an engine, smallest first. Only the token count of a step has buckets.

    The other dimensions follow from it: a scheduled request has at least one token, so a step of
    `num_tokens` never needs more request rows than that, and each row wants one token's logits.
    Block copies have shapes of their own: at most one a request and group, its partly filled block.
    """

    def __init__(
        self,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        num_groups: int,
        max_blocks_per_req: int,
    ) -> None:
        self._num_tokens = token_buckets(max_num_batched_tokens)
        self.shapes = tuple(
            StepShape(
                num_tokens=num_tokens,
                num_reqs=min(num_tokens, max_num_seqs),
                num_logits=min(num_tokens, max_num_seqs),
                num_groups=num_groups,
                max_blocks_per_req=max_blocks_per_req,
            )
            for num_tokens in self._num_tokens
        )
        self._num_copies = copy_buckets(max_num_seqs * num_groups)
        self.copy_shapes = tuple(CopyShape(num_copies=count) for count in self._num_copies)

    @property
    def largest(self) -> StepShape:
        return self.shapes[-1]

    def shape_for(self, num_tokens: int) -> StepShape:
        """The smallest shape that holds `num_tokens`.

        Raises:
            InvariantError: The scheduler went over its budget, or scheduled nothing.
        """
        if not 1 <= num_tokens <= self._num_tokens[-1]:
            raise InvariantError(
                f"a step must have 1 to {self._num_tokens[-1]} tokens, got {num_tokens}."
            )
        return self.shapes[bisect.bisect_left(self._num_tokens, num_tokens)]

    def copy_shape_for(self, num_copies: int) -> CopyShape:
        """The smallest shape that holds `num_copies`, or the largest: then several are needed."""
        num_smaller = bisect.bisect_left(self._num_copies, num_copies)
        return self.copy_shapes[min(num_smaller, len(self.copy_shapes) - 1)]
