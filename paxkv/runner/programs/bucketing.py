"""Buckets: the only file where the shapes that reach `jit` come from."""

import bisect
import dataclasses
import itertools
from collections.abc import Sequence

from models import Wants
from paxkv.errors import InvariantError
from paxkv.runner.features.base import StepVariant, add_wants

# Rows of a large vocabulary are long, and most steps with a prompt draw for few of their rows. With
# bursts of 64 rows that all sample, hidden 512 and vocabulary 16,384: 306 tokens per CPU-second
# with 8 at a time, 289 with 32 (one core with AVX-512, JAX 0.10.2).
SAMPLED_CHUNK_ROWS = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TableShape:
    """The block tables of some KV cache groups that a step has in one array (`GroupInputs`)."""

    num_groups: int
    max_blocks_per_req: int
    block_size: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Every dimension of one compiled step; dimension names as in `models/forward_batch.py`.

    Args:
        tile_tokens: The step goes through its tokens so many at a time, and not through tiles
            without any; None is all at once. Divides `num_tokens`.
        features: What it computes besides, in the order of the runner's features.
        widths: Numbers of tokens that its layers compute, the least that holds those it has;
            rising, and the last is `num_tokens`. Empty is that one alone.
    """

    num_tokens: int
    num_reqs: int
    num_logits: int  # at most one for each request, of its last token
    tables: tuple[TableShape, ...]
    tile_tokens: int | None = None
    features: tuple[StepVariant, ...] = ()
    widths: tuple[int, ...] = ()

    @property
    def wants(self) -> Wants:
        """What the step needs of the model."""
        # With as many rows either way, the last layer may as well be like the others.
        wants = Wants(logits="last" if self.num_logits < self.num_tokens else "indices")
        return add_wants(wants, self.features)

    def num_computed(self, num_tokens: int) -> int:
        """Tokens that a step of `num_tokens` computes, padding included."""
        if self.tile_tokens is None:
            return _least_width(self.widths or (self.num_tokens,), num_tokens)
        return -(-num_tokens // self.tile_tokens) * self.tile_tokens


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BurstShape:
    """Every dimension of one compiled burst: up to `max_steps` steps of one token a request.

    Args:
        widths: Numbers of requests that it computes, the least that holds those it has; rising,
            and the last is `num_reqs`. Empty is that one alone.
        chunk_rows: Rows that it draws at a time, where it has several widths.
        features: What it computes besides: the variants in every program.
    """

    max_steps: int
    num_reqs: int
    tables: tuple[TableShape, ...]
    widths: tuple[int, ...] = ()
    chunk_rows: int = SAMPLED_CHUNK_ROWS
    features: tuple[StepVariant, ...] = ()

    def num_computed(self, num_reqs: int) -> int:
        """Requests that a step of `num_reqs` computes, padding included."""
        return _least_width(self.widths or (self.num_reqs,), num_reqs)


def _least_width(widths: tuple[int, ...], count: int) -> int:
    return widths[bisect.bisect_left(widths, count)]


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

# Every bucket is a program to compile before the start, or a part of one (`share_programs`); but
# with steps four times as large as the one before, half of what short prompts compute would be
# padding. A step that is no burst has a prompt in it, and computing a few tokens takes on the CPU
# as long as 16: reading the weights.
MIN_BATCHED_TOKENS = 16
# Two requests take as long as 8 (hidden 512, one core: 4.7 ms a step for one, 7.3 for 2, 8.2 for 8,
# 11.2 for 12 or 16, 14 for 24, 18 for 32, 24 for 48, 30 for 64), and one has a program of its own.
MIN_DECODED_REQS = 8
# Halfway between two powers of two, where steps take long enough to be worth a program.
HALFWAY_REQS = (24, 48)


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


# One program holds buckets up to so many times its smallest: what it computes at its full size,
# whatever the width, is small beside the layers of a quarter of it.
_WIDEST_RATIO = 4


def share_programs(buckets: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Groups of neighboring buckets, rising, each for one program that has them as widths.

    A single row has a program of its own: nobody waits for it to be padded.

    Example: (1, 8, 16, 24, 32, 48, 64) -> ((1,), (8,), (16, 24, 32, 48, 64)).
    """
    groups: list[tuple[int, ...]] = []
    while buckets:
        smallest = -(-buckets[-1] // _WIDEST_RATIO)
        num_smaller = bisect.bisect_left(buckets, max(smallest, min(2, buckets[-1])))
        groups.insert(0, buckets[num_smaller:])
        buckets = buckets[:num_smaller]
    return tuple(groups)


def _one_by_one(buckets: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple((bucket,) for bucket in buckets)


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
        shares_programs: Neighboring buckets of bursts are one program, which chooses among them,
            and so are those of steps.
        feature_variants: For each step feature, its variants.

    Raises:
        InvariantError: A variant in every program has fields or results, or is not the only one of
            its feature.
    """

    def __init__(
        self,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_decode_burst: int,
        tables: tuple[TableShape, ...],
        max_model_len: int,
        batch_invariant: bool = False,
        sampled_chunk_rows: int | None = SAMPLED_CHUNK_ROWS,
        shares_programs: bool = False,
        feature_variants: Sequence[Sequence[StepVariant]] = (),
    ) -> None:
        self.tables = tables
        tile_tokens = INVARIANT_TILE_TOKENS if batch_invariant else None
        divide = share_programs if shares_programs else _one_by_one
        if tile_tokens is None:
            token_widths = divide(token_buckets(max_num_batched_tokens))
        else:
            token_widths = ((-(-max_num_batched_tokens // tile_tokens) * tile_tokens,),)
        self._num_tokens = tuple(widths[-1] for widths in token_widths)
        everywhere = _find_everywhere(feature_variants)
        self.step_shapes = tuple(
            StepShape(
                num_tokens=widths[-1],
                num_reqs=min(widths[-1], max_num_seqs),
                num_logits=min(widths[-1], max_num_seqs),
                tables=tables,
                tile_tokens=tile_tokens,
                features=everywhere,
                widths=widths if len(widths) > 1 else (),
            )
            for widths in token_widths
        )
        self.feature_variants = tuple(itertools.chain.from_iterable(feature_variants))
        # By those of the variants that are not in every program.
        self._feature_shapes = {
            tuple(variant for variant in features if variant not in everywhere): _with_features(
                self.step_shapes, features
            )
            for features in _combinations(feature_variants)
            if features != everywhere
        }
        req_widths = () if batch_invariant else divide(decode_buckets(max_num_seqs))
        self._num_reqs = tuple(widths[-1] for widths in req_widths)
        self.burst_shapes = tuple(
            BurstShape(
                max_steps=max_decode_burst,
                num_reqs=widths[-1],
                tables=tables,
                widths=widths if len(widths) > 1 else (),
                features=everywhere,
            )
            for widths in req_widths
        )
        self._num_copies = copy_buckets(max_num_seqs * sum(table.num_groups for table in tables))
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
            *(shape for shapes in self._feature_shapes.values() for shape in shapes[::-1]),
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
            *(shapes[-1] for shapes in self._feature_shapes.values()),
            *self.burst_shapes[-1:],
            self.copy_shapes[-1],
            self.sampler_shape,
            self.row_shape,
        )

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """The block size of every KV cache group."""
        return tuple(table.block_size for table in self.tables for _ in range(table.num_groups))

    @property
    def is_batch_invariant(self) -> bool:
        """Whether steps go through their tokens in tiles."""
        return self.step_shapes[-1].tile_tokens is not None

    @property
    def has_bursts(self) -> bool:
        """Whether steps of one token a request are bursts."""
        return bool(self.burst_shapes)

    def shape_for(self, num_tokens: int, features: tuple[StepVariant, ...] = ()) -> StepShape:
        """The smallest step with these features that holds `num_tokens`.

        Args:
            features: Without the variants in every program, which it also has.

        Raises:
            InvariantError: The scheduler went over its budget, or scheduled nothing.
        """
        bucket_idx = _find_bucket(self._num_tokens, num_tokens, "tokens")
        shapes = self._feature_shapes[features] if features else self.step_shapes
        return shapes[min(bucket_idx, len(shapes) - 1)]

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


def _combinations(
    feature_variants: Sequence[Sequence[StepVariant]],
) -> list[tuple[StepVariant, ...]]:
    """What may meet in a step: at most one variant of each feature, and at least one; most first.

    Example: (a, b), (c) -> ac, a, bc, b, c; or ac, bc, c if c is in every program.
    """
    choices = itertools.product(
        *(
            variants if _find_everywhere([variants]) else (*variants, None)
            for variants in feature_variants
        )
    )
    found = [tuple(variant for variant in choice if variant is not None) for choice in choices]
    return [features for features in found if features]


def _find_everywhere(feature_variants: Sequence[Sequence[StepVariant]]) -> tuple[StepVariant, ...]:
    """The variants in every program, in the order of the features.

    Raises:
        InvariantError: As `StepBuckets`.
    """
    found = []
    for variants in feature_variants:
        for variant in variants:
            if not variant.is_in_every_program:
                continue
            fields = variant.fields(num_tokens=1, num_reqs=1)
            results = variant.results(num_tokens=1, num_reqs=1)
            if fields or results or len(variants) > 1:
                raise InvariantError(
                    f"{variant} is in every program, but has the fields {sorted(fields)}, the "
                    f"results {sorted(results)} and {len(variants) - 1} other variants of its "
                    "feature. Bursts have neither fields nor results for features, and every "
                    "step has the same variant: keep numbers in a donated array."
                )
            found.append(variant)
    return tuple(found)


def _with_features(
    step_shapes: tuple[StepShape, ...], features: tuple[StepVariant, ...]
) -> tuple[StepShape, ...]:
    """Steps with these features, smallest first; the largest alone where one of them is rare."""
    if not all(variant.has_every_bucket or variant.is_in_every_program for variant in features):
        step_shapes = step_shapes[-1:]
    return tuple(dataclasses.replace(shape, features=features) for shape in step_shapes)


def _find_bucket(buckets: tuple[int, ...], count: int, what: str) -> int:
    """Index of the smallest bucket that holds `count`."""
    if not 1 <= count <= buckets[-1]:
        raise InvariantError(f"a step must have 1 to {buckets[-1]} {what}, got {count}.")
    return bisect.bisect_left(buckets, count)
