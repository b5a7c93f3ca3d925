"""Buckets: the only file where the shapes that reach `jit` come from."""

import bisect
import dataclasses

from paxkv.errors import InvariantError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Every dimension of one compiled step; dimension names as in `models/forward_batch.py`.

    Args:
        tile_tokens: The step goes through its tokens so many at a time, and not through tiles
            without any; None is all at once. Divides `num_tokens`.
        has_prompt_logprobs: It finds log-probabilities of every token too.
        num_prompt_logits: And hands over so many logits of each: the whole vocabulary, or 0.
    """

    num_tokens: int
    num_reqs: int
    num_logits: int
    num_groups: int
    max_blocks_per_req: int
    tile_tokens: int | None = None
    has_prompt_logprobs: bool = False
    num_prompt_logits: int = 0

    def num_computed(self, num_tokens: int) -> int:
        """Tokens that a step of `num_tokens` computes, padding included."""
        if self.tile_tokens is None:
            return self.num_tokens
        return -(-num_tokens // self.tile_tokens) * self.tile_tokens


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BurstShape:
    """Every dimension of one compiled burst: up to `max_steps` steps of one token a request."""

    max_steps: int
    num_reqs: int
    num_groups: int
    max_blocks_per_req: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CopyShape:
    """The dimension of one compiled program that copies blocks."""

    num_copies: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplerShape:
    """The dimensions of the one compiled program that draws the tokens of steps.

    Args:
        num_rows: Most rows of a step.
        max_model_len: Tokens of a row that are kept on the device.
        chunk_rows: Rows that it draws at a time; at most `num_rows`.
    """

    num_rows: int
    max_model_len: int
    chunk_rows: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowShape:
    """The dimensions of the one compiled program that writes a request's row of the `RowState`."""

    num_rows: int
    max_model_len: int


ProgramShape = StepShape | BurstShape | CopyShape | SamplerShape | RowShape

# Tokens that batch-invariant steps compute at a time. Fewer make a single request faster, more make
# prompts and large batches so.
INVARIANT_TILE_TOKENS = 32

# Every bucket is a program to compile before the start, of several CPU-seconds; but with steps four
# times as large as the one before, half of what short prompts compute would be padding. A step that
# is no burst has a prompt in it, and computing a few tokens takes on the CPU as long as 16: reading
# the weights.
MIN_BATCHED_TOKENS = 16
# Two requests take as long as 8 (hidden 512, one core: 4.7 ms a step for one, 7.3 for 2, 8.2 for 8,
# 11.2 for 12 or 16, 14 for 24, 18 for 32, 24 for 48, 30 for 64), and one has a program of its own.
MIN_DECODED_REQS = 8
# Halfway between two powers of two, where steps take long enough to be worth a program.
HALFWAY_REQS = (24, 48)


# Rows of a large vocabulary are long, and most steps with a prompt draw for few of their rows.
SAMPLED_CHUNK_ROWS = 8


def token_buckets(max_num_batched_tokens: int) -> tuple[int, ...]:
    """Padded token counts: powers of two from 16 on, and the largest step exactly.

    Example: 48 -> (16, 32, 48). From 9 tokens on, at most half of a step is padding.
    """
    return _growing(MIN_BATCHED_TOKENS, max_num_batched_tokens, growth=2)


def decode_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Padded numbers of requests in a burst: one, powers of two from 8 on, 24, 48, and all exactly.

    Example: 40 -> (1, 8, 16, 24, 32, 40).
    """
    powers = _growing(MIN_DECODED_REQS, max_num_seqs, growth=2)
    halfway = [num_reqs for num_reqs in HALFWAY_REQS if num_reqs < max_num_seqs]
    return tuple(sorted({1, *powers, *halfway}))


def _growing(smallest: int, largest: int, *, growth: int) -> tuple[int, ...]:
    """`smallest` and what follows it below `largest`, each `growth` times the last; `largest`."""
    counts = []
    count = smallest
    while count < largest:
        counts.append(count)
        count *= growth
    return (*counts, largest)


# Block copies come with forks, a few at a time: three programs serve up to 512 of them.
MIN_COPIES = 8
COPIES_GROWTH = 8


def copy_buckets(max_num_copies: int) -> tuple[int, ...]:
    """Padded numbers of block copies; the largest is exact. Example: 100 -> (8, 64, 100)."""
    return _growing(MIN_COPIES, max_num_copies, growth=COPIES_GROWTH)


class StepBuckets:
    """The shapes of an engine, smallest first. Steps have buckets of their token count alone.

    The other dimensions follow from it: a scheduled request has at least one token, so a step of
    `num_tokens` never needs more request rows than that, and each row wants one token's logits.
    Steps in which every request has one token are bursts, of one step or more: they pay for no
    prompt, and have buckets of their request count.
    Block copies have shapes of their own: at most one a request and group, its partly filled block.

    Args:
        max_decode_burst: Most steps of a burst.
        batch_invariant: All steps have one shape, and go through their tokens in tiles: there is
            one program, so that every token is computed by the same instructions.
        sampled_chunk_rows: Rows that the sampler of steps draws at a time; None is all at once.
        num_prompt_logits: See `StepShape`.
    """

    def __init__(
        self,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_decode_burst: int,
        num_groups: int,
        max_blocks_per_req: int,
        max_model_len: int,
        batch_invariant: bool = False,
        sampled_chunk_rows: int | None = SAMPLED_CHUNK_ROWS,
        num_prompt_logits: int = 0,
    ) -> None:
        tile_tokens = INVARIANT_TILE_TOKENS if batch_invariant else None
        self._num_tokens = token_buckets(max_num_batched_tokens)
        if tile_tokens is not None:
            self._num_tokens = (-(-max_num_batched_tokens // tile_tokens) * tile_tokens,)
        self.step_shapes = tuple(
            StepShape(
                num_tokens=num_tokens,
                num_reqs=min(num_tokens, max_num_seqs),
                num_logits=min(num_tokens, max_num_seqs),
                num_groups=num_groups,
                max_blocks_per_req=max_blocks_per_req,
                tile_tokens=tile_tokens,
            )
            for num_tokens in self._num_tokens
        )
        # Few ask for it: one shape for steps of any size.
        self.prompt_step_shape = dataclasses.replace(
            self.step_shapes[-1], has_prompt_logprobs=True, num_prompt_logits=num_prompt_logits
        )
        self._num_reqs = () if batch_invariant else decode_buckets(max_num_seqs)
        self.burst_shapes = tuple(
            BurstShape(
                max_steps=max_decode_burst,
                num_reqs=num_reqs,
                num_groups=num_groups,
                max_blocks_per_req=max_blocks_per_req,
            )
            for num_reqs in self._num_reqs
        )
        self._num_copies = copy_buckets(max_num_seqs * num_groups)
        self.copy_shapes = tuple(CopyShape(num_copies=count) for count in self._num_copies)
        self.sampler_shape = SamplerShape(
            num_rows=max_num_seqs,
            max_model_len=max_model_len,
            chunk_rows=min(sampled_chunk_rows or max_num_seqs, max_num_seqs),
        )
        self.row_shape = RowShape(num_rows=max_num_seqs, max_model_len=max_model_len)

    @property
    def largest_first(self) -> tuple[ProgramShape, ...]:
        """Every shape, in an order in which the longest compilations begin first."""
        return (
            self.prompt_step_shape,
            *self.step_shapes[::-1],
            *self.burst_shapes[::-1],
            self.sampler_shape,
            self.row_shape,
            *self.copy_shapes[::-1],
        )

    @property
    def largest(self) -> tuple[ProgramShape, ...]:
        """The largest shape of each kind."""
        return (
            self.step_shapes[-1],
            self.prompt_step_shape,
            *self.burst_shapes[-1:],
            self.copy_shapes[-1],
            self.sampler_shape,
            self.row_shape,
        )

    @property
    def has_bursts(self) -> bool:
        """Whether steps of one token a request are bursts."""
        return bool(self.burst_shapes)

    def shape_for(self, num_tokens: int) -> StepShape:
        """The smallest step that holds `num_tokens`.

        Raises:
            InvariantError: The scheduler went over its budget, or scheduled nothing.
        """
        return self.step_shapes[_find_bucket(self._num_tokens, num_tokens, "tokens")]

    def burst_shape_for(self, num_reqs: int) -> BurstShape:
        """The smallest burst that holds `num_reqs`.

        Raises:
            InvariantError: There are more requests than may run, or none.
        """
        return self.burst_shapes[_find_bucket(self._num_reqs, num_reqs, "requests")]

    def copy_shape_for(self, num_copies: int) -> CopyShape:
        """The smallest shape that holds `num_copies`, or the largest: then several are needed."""
        num_smaller = bisect.bisect_left(self._num_copies, num_copies)
        return self.copy_shapes[min(num_smaller, len(self.copy_shapes) - 1)]


def _find_bucket(buckets: tuple[int, ...], count: int, what: str) -> int:
    """Index of the smallest bucket that holds `count`."""
    if not 1 <= count <= buckets[-1]:
        raise InvariantError(f"a step must have 1 to {buckets[-1]} {what}, got {count}.")
    return bisect.bisect_left(buckets, count)
