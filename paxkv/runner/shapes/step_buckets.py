"""`StepBuckets`: the shapes of all programs of an engine."""

import bisect
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Literal, TypeVar

from paxkv.errors import InvariantError
from paxkv.runner.shapes.bucket_sizes import (
    INVARIANT_TILE_TOKENS,
    SAMPLED_CHUNK_ROWS,
    copy_buckets,
    decode_buckets,
    one_program_each,
    share_programs,
    token_buckets,
)
from paxkv.runner.shapes.own_program import OwnProgram
from paxkv.runner.shapes.program_shapes import (
    BurstShape,
    CopyShape,
    DrafterShape,
    DraftShape,
    NgramShape,
    ProgramShape,
    RowShape,
    SamplerShape,
    StepShape,
    TableShape,
)
from paxkv.runner.shapes.step_variant import StepVariant

_Shape = TypeVar("_Shape", StepShape, BurstShape)


class StepBuckets:
    """The shapes of an engine, each kind with the smallest first.

    - Steps have buckets of their number of tokens. The other dimensions follow: a scheduled request
      has at least one token, so a step has at most `num_tokens` requests. Each request needs the
      logits of `max_draws` tokens at most.
    - If requests may have several draws, there are also programs for steps without drafts, after
      which the draft head does not run. Their last layer computes only the last token of each
      request. A step with features that are not in every program never uses them.
    - A step in which every request has one token is a burst of one step or more. Bursts have
      buckets of their number of requests.
    - Block copies have buckets of their number. A request copies at most one block in each KV cache
      group of tokens, the one that is partly filled. States are never copied.

    Args:
        max_decode_burst: Most steps of a burst.
        max_draws: Most tokens that one request draws in a step; above 1, steps verify drafts.
        has_draft_head: A draft head runs after steps, and proposes up to `max_draws - 1` tokens.
        burst_drafts: The drafts that bursts verify. None: they verify none.
        always_drafts: The draft head runs after every step, so there are no bursts.
        batch_invariant: One program computes all steps, tile by tile, so that the same instructions
            compute every token.
        sampled_chunk_rows: Rows that the sampler draws at a time. None: all rows.
        shares_programs: One program serves several neighboring buckets of steps, or of bursts.
        feature_variants: For each step feature, its variants.
        own_programs: Programs of features other than steps and bursts.

    Raises:
        InvariantError: A variant in every program has fields or results, or is not the only variant
            of its feature; or a variant in bursts has results.
    """

    def __init__(
        self,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_decode_burst: int,
        tables: tuple[TableShape, ...],
        max_model_len: int,
        max_draws: int = 1,
        has_draft_head: bool = False,
        burst_drafts: NgramShape | DrafterShape | None = None,
        always_drafts: bool = False,
        batch_invariant: bool = False,
        sampled_chunk_rows: int | None = SAMPLED_CHUNK_ROWS,
        shares_programs: bool = False,
        feature_variants: Sequence[Sequence[StepVariant]] = (),
        own_programs: Sequence[OwnProgram] = (),
    ) -> None:
        self.tables = tables
        self.max_draws = max_draws
        self.own_programs = tuple(own_programs)
        tile_tokens = INVARIANT_TILE_TOKENS if batch_invariant else None
        divide = share_programs if shares_programs else one_program_each
        if tile_tokens is None:
            buckets = token_buckets(max_num_batched_tokens, verifies_drafts=max_draws > 1)
            token_widths = divide(buckets)
        else:
            # A tile may end before the drafts of a model with states. So the last tile may begin at
            # any token, and needs room for all its tokens.
            has_room = max_draws > 1 and any(table.is_state for table in tables)
            num_tiles = -(-max_num_batched_tokens // tile_tokens) + has_room
            token_widths = ((num_tiles * tile_tokens,),)
        self._num_tokens = tuple(widths[-1] for widths in token_widths)
        everywhere = _find_everywhere(feature_variants)
        _check_bursts(feature_variants)
        self.step_shapes = tuple(
            StepShape(
                num_tokens=widths[-1],
                num_reqs=min(widths[-1], max_num_seqs),
                num_logits=min(widths[-1], max_num_seqs * max_draws),
                logits=_choose_logits(widths[-1], max_num_seqs) if max_draws == 1 else "indices",
                max_draws=max_draws,
                tables=tables,
                tile_tokens=tile_tokens,
                features=everywhere,
                widths=widths if len(widths) > 1 else (),
            )
            for widths in token_widths
        )
        plain = tuple(variant for variant in everywhere if not variant.is_for_draft_head)
        # One for each of `step_shapes`. A batch-invariant engine has only one program, and if the
        # draft head runs after every step, each step needs all rows.
        self._plain_shapes = self.step_shapes
        if max_draws > 1 and not batch_invariant and not always_drafts:
            self._plain_shapes = tuple(
                dataclasses.replace(
                    shape,
                    num_logits=min(shape.num_tokens, max_num_seqs),
                    logits=_choose_logits(shape.num_tokens, max_num_seqs),
                    features=plain,
                )
                for shape in self.step_shapes
            )
        self.feature_variants = tuple(itertools.chain.from_iterable(feature_variants))
        combinations = [c for c in _combinations(feature_variants) if c != everywhere]
        # The keys leave out variants that are in every program.
        self._feature_shapes = {
            tuple(variant for variant in features if variant not in everywhere): _with_features(
                self.step_shapes, features
            )
            for features in combinations
        }
        has_bursts = not batch_invariant and not always_drafts
        req_widths = divide(decode_buckets(max_num_seqs)) if has_bursts else ()
        self._num_reqs = tuple(widths[-1] for widths in req_widths)
        self.burst_shapes = tuple(
            BurstShape(
                max_steps=max_decode_burst,
                num_reqs=widths[-1],
                tables=tables,
                widths=widths if len(widths) > 1 else (),
                max_model_len=max_model_len,
                chunk_rows=min(sampled_chunk_rows or widths[-1], widths[-1]),
                features=plain,
            )
            for widths in req_widths
        )
        # Bursts with features that take part in them. Keys as above.
        self._feature_bursts = {
            tuple(variant for variant in features if variant not in everywhere): _with_features(
                self.burst_shapes, tuple(v for v in features if not v.is_for_draft_head)
            )
            for features in combinations
            if all(variant.is_in_bursts or variant in everywhere for variant in features)
        }
        # By the shape of the step.
        self._draft_shapes: dict[StepShape, DraftShape] = {}
        if has_draft_head:
            steps = itertools.chain(self.step_shapes, *self._feature_shapes.values())
            self._draft_shapes = {
                shape: _draft_shape(shape, shares_programs=shares_programs) for shape in steps
            }
        num_copied = max(1, sum(table.num_groups for table in tables if not table.is_state))
        self._num_copies = copy_buckets(max_num_seqs * num_copied)
        self.copy_shapes = tuple(CopyShape(num_copies=count) for count in self._num_copies)
        self.slot_shapes = tuple(
            table.slot_shape(max_num_seqs) for table in tables if table.is_state
        )
        num_rows = self.step_shapes[-1].num_logits
        self.sampler_shape = SamplerShape(
            num_rows=num_rows,
            num_reqs=max_num_seqs,
            max_draws=max_draws,
            max_model_len=max_model_len,
            chunk_rows=min(sampled_chunk_rows or num_rows, num_rows),
        )
        self.row_shape = RowShape(num_rows=max_num_seqs, max_model_len=max_model_len)
        # One for each of the first `burst_shapes`. Larger ones would need more rows of logits.
        self.drafting_burst_shapes: tuple[BurstShape, ...] = ()
        if burst_drafts is not None:
            shapes = (
                # A head proposes drafts from the hidden states.
                dataclasses.replace(
                    _drafting_burst(shape, burst_drafts, sampled_chunk_rows), features=everywhere
                )
                for shape in self.burst_shapes
            )
            self.drafting_burst_shapes = tuple(s for s in shapes if s.num_draws <= num_rows)

    @property
    def largest_first(self) -> tuple[ProgramShape, ...]:
        """Every shape. The shapes that take longest to compile come first."""
        return (
            *self.own_programs,
            *(shape for shapes in self._feature_shapes.values() for shape in shapes[::-1]),
            *dict.fromkeys((*self.step_shapes[::-1], *self._plain_shapes[::-1])),
            *(shape for shapes in self._feature_bursts.values() for shape in shapes[::-1]),
            *self.drafting_burst_shapes[::-1],
            *self.burst_shapes[::-1],
            *self._draft_shapes.values(),
            self.sampler_shape,
            self.row_shape,
            *dict.fromkeys(self.slot_shapes),
            *self.copy_shapes[::-1],
        )

    @property
    def largest(self) -> tuple[ProgramShape, ...]:
        """The largest shape of each kind, and all programs of features."""
        return (
            *self.own_programs,
            self.step_shapes[-1],
            *(shapes[-1] for shapes in self._feature_shapes.values()),
            *(shapes[-1] for shapes in self._feature_bursts.values() if shapes),
            *self.drafting_burst_shapes[-1:],
            *self.burst_shapes[-1:],
            *list(self._draft_shapes.values())[-1:],
            self.copy_shapes[-1],
            self.sampler_shape,
            self.row_shape,
            *dict.fromkeys(self.slot_shapes),
        )

    @property
    def block_sizes(self) -> tuple[int | None, ...]:
        """Tokens in a block, for every KV cache group; None for a group of states."""
        return tuple(
            None if table.is_state else table.block_size
            for table in self.tables
            for _ in range(table.num_kv_cache_groups)
        )

    @property
    def is_batch_invariant(self) -> bool:
        """Whether steps compute their tokens tile by tile."""
        return self.step_shapes[-1].tile_tokens is not None

    @property
    def has_bursts(self) -> bool:
        """Whether steps of one token per request are bursts."""
        return bool(self.burst_shapes)

    def shape_for(
        self,
        num_tokens: int,
        features: tuple[StepVariant, ...] = (),
        *,
        has_drafts: bool = True,
    ) -> StepShape:
        """The smallest step with these features that holds `num_tokens`.

        Args:
            features: Without the variants that are in every program; the step has those too.
            has_drafts: The step verifies drafts, or the draft head runs after it.

        Raises:
            InvariantError: The scheduler scheduled nothing, or more than `max_num_batched_tokens`;
                or these features may not meet.
        """
        bucket_idx = _find_bucket(self._num_tokens, num_tokens, "tokens")
        own_shapes = self.step_shapes if has_drafts else self._plain_shapes
        shapes = self._feature_shapes.get(features) if features else own_shapes
        if shapes is None:
            raise InvariantError(f"a step cannot have these features together: got {features}.")
        return shapes[min(bucket_idx, len(shapes) - 1)]

    def can_burst(self, features: tuple[StepVariant, ...]) -> bool:
        """Whether there are bursts with these features; `features` as in `shape_for`."""
        return self.has_bursts and (not features or features in self._feature_bursts)

    def burst_shape_for(
        self,
        num_reqs: int,
        features: tuple[StepVariant, ...] = (),
        *,
        verifies_drafts: bool = False,
    ) -> BurstShape:
        """The smallest burst with these features that holds `num_reqs`.

        Args:
            features: As in `shape_for`.
            verifies_drafts: Prefer a burst that verifies drafts. There is none with features that
                are not in every program, or if its logits had more rows than those of a step.

        Raises:
            InvariantError: There is no request, or more than `max_num_seqs`; or there are no bursts
                with these features.
        """
        bucket_idx = _find_bucket(self._num_reqs, num_reqs, "requests")
        if verifies_drafts and not features and bucket_idx < len(self.drafting_burst_shapes):
            return self.drafting_burst_shapes[bucket_idx]
        shapes = self._feature_bursts.get(features) if features else self.burst_shapes
        if shapes is None:
            raise InvariantError(f"a burst cannot have these features: got {features}.")
        return shapes[min(bucket_idx, len(shapes) - 1)]

    def draft_shape_for(self, step: StepShape) -> DraftShape | None:
        """The program of the draft head after a step; None if there is no head."""
        return self._draft_shapes.get(step)

    def copy_shape_for(self, num_copies: int) -> CopyShape:
        """The smallest shape that holds `num_copies`, or the largest shape if none does."""
        num_smaller = bisect.bisect_left(self._num_copies, num_copies)
        return self.copy_shapes[min(num_smaller, len(self.copy_shapes) - 1)]


def _choose_logits(num_tokens: int, max_num_seqs: int) -> Literal["last", "indices"]:
    # The last layer leaves out rows only if there are such rows.
    return "last" if max_num_seqs < num_tokens else "indices"


def _drafting_burst(
    shape: BurstShape, drafts: NgramShape | DrafterShape, sampled_chunk_rows: int | None
) -> BurstShape:
    if isinstance(drafts, DrafterShape):
        drafts = dataclasses.replace(drafts, req_widths=shape.widths)
    drafting = dataclasses.replace(shape, drafts=drafts)
    # A step has at least one token of each request.
    widths = tuple(
        width
        for width in token_buckets(drafting.num_tokens, verifies_drafts=True)
        if shape.widths and width >= shape.widths[0]
    )
    return dataclasses.replace(
        drafting,
        widths=widths if len(widths) > 1 else (),
        chunk_rows=min(sampled_chunk_rows or drafting.num_draws, drafting.num_draws),
    )


def _draft_shape(step: StepShape, *, shares_programs: bool) -> DraftShape:
    # A batch-invariant step has no widths, because it computes tiles. The head has no tiles: its
    # drafts may differ from batch to batch, and answers do not depend on them.
    in_tiles = step.tile_tokens is not None
    return DraftShape(
        step=step,
        num_drafts=step.max_draws - 1,
        token_widths=token_buckets(step.num_tokens) if in_tiles else step.widths,
        req_widths=decode_buckets(step.num_reqs) if in_tiles or shares_programs else (),
    )


def _combinations(
    feature_variants: Sequence[Sequence[StepVariant]],
) -> list[tuple[StepVariant, ...]]:
    """Sets of variants that a step may have: at most one of each feature, and at least one in all.

    Example: (a, b), (c) -> ac, a, bc, b, c. If c is in every program: ac, bc, c. If no two may
    meet: a, b, c.
    """
    choices = itertools.product(
        *(
            variants if _find_everywhere([variants]) else (*variants, None)
            for variants in feature_variants
        )
    )
    found = [tuple(variant for variant in choice if variant is not None) for choice in choices]
    return [features for features in found if features and _may_meet(features)]


def _may_meet(features: tuple[StepVariant, ...]) -> bool:
    pairs = itertools.permutations(features, 2)
    return all(variant.may_meet(other) for variant, other in pairs)


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
                    "feature. A variant in every program keeps its numbers in a donated array."
                )
            found.append(variant)
    return tuple(found)


def _check_bursts(feature_variants: Sequence[Sequence[StepVariant]]) -> None:
    for variant in itertools.chain.from_iterable(feature_variants):
        results = variant.results(num_tokens=1, num_reqs=1)
        if variant.is_in_bursts and results:
            raise InvariantError(
                f"{variant} is in bursts, but has the results {sorted(results)}. Bursts return no "
                "results of features."
            )


def _with_features(
    shapes: tuple[_Shape, ...], features: tuple[StepVariant, ...]
) -> tuple[_Shape, ...]:
    """The shapes with these features: all sizes, or the largest alone if a feature is rare."""
    if not all(variant.has_every_bucket or variant.is_in_every_program for variant in features):
        shapes = shapes[-1:]
    return tuple(dataclasses.replace(shape, features=features) for shape in shapes)


def _find_bucket(buckets: tuple[int, ...], count: int, what: str) -> int:
    """Index of the smallest bucket that holds `count`."""
    if not 1 <= count <= buckets[-1]:
        raise InvariantError(f"a step must have 1 to {buckets[-1]} {what}, got {count}.")
    return bisect.bisect_left(buckets, count)
