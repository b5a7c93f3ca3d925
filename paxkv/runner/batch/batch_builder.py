"""Turns the rows scheduled in a step into one packed int32 buffer for the device."""

from collections.abc import Mapping, Sequence

import numpy as np

from paxkv.contracts.scheduler_output import SchedulerOutput
from paxkv.errors import InvariantError
from paxkv.runner.batch.built_step import BuiltStep
from paxkv.runner.batch.burst_repeater import BurstRepeater
from paxkv.runner.batch.draw_plan import plan_draws
from paxkv.runner.batch.input_batch import InputBatch
from paxkv.runner.batch.state_slots import fill_slot_switches
from paxkv.runner.features.base import FeatureStep, StepFeature
from paxkv.runner.sampling.sampling_columns import needs_host_to_draw
from paxkv.runner.shapes.packed_layout import PackedLayout, table_field
from paxkv.runner.shapes.program_shapes import BurstShape, StepShape
from paxkv.runner.shapes.scheduled_rows import ScheduledRows
from paxkv.runner.shapes.step_buckets import StepBuckets
from paxkv.runner.shapes.step_variant import StepVariant


class BatchBuilder:
    """Builds steps of the shapes in `buckets` from the rows of an `InputBatch`.

    Args:
        features: The features whose variants the buckets have.
    """

    def __init__(
        self,
        *,
        buckets: StepBuckets,
        input_batch: InputBatch,
        max_num_seqs: int,
        features: Sequence[StepFeature] = (),
    ) -> None:
        self._buckets = buckets
        self._rows = input_batch
        self._host_token = max_num_seqs  # the `token_source` of tokens that are in `token_ids`
        self._block_sizes = buckets.block_sizes
        self._features = tuple(features)
        # Set if the next step may repeat the last one.
        self._burst_repeater: BurstRepeater | None = None

    def build(self, scheduler_output: SchedulerOutput) -> BuiltStep:
        """Packs one step. The rows must have been updated with `scheduler_output` before.

        If every request computes one token, the step is a burst of one step.

        Example: num_scheduled [2, 5, 3] -> query_start_loc [0, 2, 7, 10]
        -> request of each token [0, 0, 1, 1, 1, 1, 1, 2, 2, 2].

        Raises:
            InvariantError: A request would compute tokens that do not exist or have no block, or
                would write to the null block.
        """
        req_ids = list(scheduler_output.num_scheduled_tokens)
        rows_np = self._rows.rows_of(req_ids)
        grown_rows = self._rows.drain_grown_rows()
        repeater, self._burst_repeater = self._burst_repeater, None
        built = None
        if repeater is not None:
            built = repeater.repeat(scheduler_output, rows_np, grown_rows)
        if built is None:
            repeater = None
            built = self._build_anew(scheduler_output, req_ids, rows_np)
        are_repeatable = all(feature.is_repeatable for feature in built.features)
        can_repeat = isinstance(built.shape, BurstShape) and are_repeatable
        if can_repeat and built.num_drawn_of_each:
            self._burst_repeater = repeater or BurstRepeater(self._rows, built)
        return built

    def _build_anew(
        self,
        scheduler_output: SchedulerOutput,
        req_ids: list[str],
        rows_np: np.ndarray,  # i32[len(req_ids)]
    ) -> BuiltStep:
        num_steps = scheduler_output.num_decode_steps
        rows = ScheduledRows(
            req_ids,
            rows_np=rows_np,
            num_scheduled_np=np.array(
                list(scheduler_output.num_scheduled_tokens.values()), dtype=np.int32
            ),
            num_computed_np=self._rows.num_computed_tokens_np[rows_np],
            num_tokens_np=self._rows.num_tokens_np[rows_np],
            num_pending_np=self._rows.num_pending_np[rows_np],
            num_drafts_np=_count_drafts(scheduler_output, req_ids),
            token_ids_np=self._rows.token_ids_np,
            num_decode_steps=num_steps,
        )
        self._check(rows, is_burst=num_steps > 1)
        self._check_written_blocks(rows)
        needs_host = bool(needs_host_to_draw(self._rows.sampling_rows_np[rows.rows_np]).any())
        planned = [feature.plan(rows) for feature in self._features]
        features = tuple(feature for feature in planned if feature is not None)
        variants = _variants_of(features)
        can_burst = self._buckets.can_burst(variants)
        if num_steps > 1 and (needs_host or not can_burst):
            needed = "the host between its tokens" if can_burst else f"the features {variants}"
            raise InvariantError(
                f"requests {rows.req_ids} cannot decode in a burst of {num_steps} steps: one needs "
                f"{needed}."
            )
        # Where requests may have several draws, bursts leave no logits for the sampler.
        can_burst &= not needs_host or self._buckets.max_draws == 1
        can_burst &= not any(feature.needs_step for feature in features)
        if num_steps > 1 or (can_burst and bool((rows.num_scheduled_np == 1).all())):
            return self._build_burst(
                *(rows, num_steps, features, scheduler_output.slot_switches),
                leaves_logits=needs_host,
            )
        return self._build_step(rows, features, scheduler_output.scheduled_spec_decode_tokens)

    def _build_step(
        self,
        rows: ScheduledRows,
        features: tuple[FeatureStep, ...],
        drafts: Mapping[str, Sequence[int]],
    ) -> BuiltStep:
        num_reqs, num_tokens = len(rows.req_ids), len(rows.positions_np)
        has_drafts = bool(drafts) or any(feature.needs_step for feature in features)
        shape = self._buckets.shape_for(num_tokens, _variants_of(features), has_drafts=has_drafts)
        packed_np, views = _make_buffer(shape)
        self._fill(views, rows, rows.row_of_token_np, rows.positions_np)
        if drafts:
            self._fill_drafts(views, rows, drafts)
        views["query_start_loc"][1 : num_reqs + 1] = rows.ends_np
        views["query_start_loc"][num_reqs + 1 :] = num_tokens
        views["seq_lens"][:num_reqs] = rows.num_computed_np + rows.num_scheduled_np
        if "state_ends" in views:
            views["state_ends"][:num_reqs] = rows.ends_np - rows.num_drafts_np
        draws = plan_draws(rows, self._rows.is_pooled_np[rows.rows_np])
        num_draws = len(draws.req_idx_np)
        views["logits_indices"][:num_draws] = draws.token_idx_np
        drawing_rows_np = rows.rows_np[draws.req_idx_np]
        views["sampling_rows"][:num_draws] = self._rows.sampling_rows_np[drawing_rows_np]
        views["draw_position"][:num_draws] = draws.draw_position_np
        if shape.max_draws > 1:
            views["draw_idx"][:num_draws] = draws.draw_idx_np
            views["draw_req"][:num_draws] = draws.req_idx_np
        _fill_features(features, views)
        return BuiltStep(
            shape=shape,
            packed_np=packed_np,
            req_ids=rows.req_ids,
            rows_np=rows.rows_np,
            num_drawn_np=draws.num_drawn_np,
            num_drawn_of_each=1 if (draws.num_drawn_np == 1).all() else None,
            num_drafts_np=rows.num_drafts_np,
            first_draw_np=draws.first_row_np,
            num_padded_tokens=shape.num_computed(num_tokens) - num_tokens,
            following_ids_np=_following_ids(rows, shape),
            features=features,
        )

    def _build_burst(
        self,
        rows: ScheduledRows,
        num_steps: int,
        features: tuple[FeatureStep, ...],
        slot_switches: Mapping[str, int],
        *,
        leaves_logits: bool,
    ) -> BuiltStep:
        num_reqs = len(rows.req_ids)
        # A burst of one step has no room for drafts.
        verifies_drafts = num_steps > 1 and any(step.verifies_drafts for step in features)
        shape = self._buckets.burst_shape_for(
            num_reqs, _variants_of(features), verifies_drafts=verifies_drafts
        )
        if shape.drafts is None:
            features = tuple(step.in_plain_burst() for step in features)
        if num_steps > shape.max_steps:
            raise InvariantError(f"a burst has at most {shape.max_steps} steps, got {num_steps}.")
        packed_np, views = _make_buffer(shape)
        self._fill(views, rows, rows.rows_np, rows.num_computed_np)
        views["num_steps"][:] = num_steps
        views["leaves_logits"][:] = leaves_logits
        views["num_tokens"][:num_reqs] = rows.num_scheduled_np
        views["sampling_rows"][:num_reqs] = self._rows.sampling_rows_np[rows.rows_np]
        views["ending_ids"][:num_reqs] = self._rows.ending_ids_np[rows.rows_np]
        views["first_end"][:num_reqs] = self._rows.first_end_np[rows.rows_np]
        if "slot_switch" in views:
            fill_slot_switches(
                views["slot_switch"], rows.num_computed_np, rows.req_ids, slot_switches
            )
        _fill_features(features, views)
        # The single token of a request may be inside its prompt. Then nothing is drawn.
        is_drawn_np = rows.num_computed_np + 1 >= rows.num_tokens_np
        views["draws"][:num_reqs] = is_drawn_np
        num_drawn_np = rows.num_scheduled_np * is_drawn_np
        return BuiltStep(
            shape=shape,
            packed_np=packed_np,
            req_ids=rows.req_ids,
            rows_np=rows.rows_np,
            num_drawn_np=num_drawn_np,
            num_drawn_of_each=num_steps if (num_drawn_np == num_steps).all() else None,
            num_drafts_np=rows.num_drafts_np,
            first_draw_np=np.arange(num_reqs, dtype=np.int32),
            # The host does not know how many drafts a burst verifies, so they do not count.
            num_padded_tokens=shape.num_computed(num_reqs) * num_steps - len(rows.positions_np),
            features=features,
            leaves_logits=leaves_logits,
        )

    def _fill(
        self,
        views: dict[str, np.ndarray],
        rows: ScheduledRows,
        row_of_token_np: np.ndarray,  # i32[num_tokens]
        positions_np: np.ndarray,  # i32[num_tokens]
    ) -> None:
        """Fills the fields that steps and bursts share, except those of draws."""
        num_reqs, num_tokens = len(rows.req_ids), len(positions_np)
        views["positions"][:num_tokens] = positions_np
        if "tenancies" in views:
            views["tenancies"][0, :num_reqs] = rows.rows_np
            views["tenancies"][1, :num_reqs] = self._rows.changed_at_np[rows.rows_np]
        group_tables = iter(self._rows.block_tables.tables)
        for inputs_idx, table in enumerate(self._buckets.tables):
            tables_np = views[table_field(inputs_idx)]
            if table.is_state:
                tables_np[:, :num_reqs] = next(group_tables).slots_np[:, rows.rows_np]
                continue
            for group_np in tables_np:
                group_np[:num_reqs] = next(group_tables).block_ids_np[rows.rows_np]
        token_source_np = views["token_source"]
        token_source_np[:] = self._host_token
        is_on_device_np = positions_np >= self._rows.num_tokens_np[row_of_token_np]
        host_positions_np = np.where(is_on_device_np, 0, positions_np)
        views["token_ids"][:num_tokens] = self._rows.token_ids_np[
            row_of_token_np, host_positions_np
        ]
        if is_on_device_np.any():
            prev_sampled_idx_np = self._rows.prev_sampled_idx_np[row_of_token_np]
            token_source_np[:num_tokens] = np.where(
                is_on_device_np, prev_sampled_idx_np, self._host_token
            )

    def _fill_drafts(
        self,
        views: dict[str, np.ndarray],
        rows: ScheduledRows,
        drafts: Mapping[str, Sequence[int]],
    ) -> None:
        for req_id, draft_ids in drafts.items():
            end = int(rows.ends_np[rows.req_ids.index(req_id)])
            places = slice(end - len(draft_ids), end)
            views["token_ids"][places] = draft_ids
            views["token_source"][places] = self._host_token

    def _check(self, rows: ScheduledRows, *, is_burst: bool) -> None:
        rows_np, num_scheduled_np = rows.rows_np, rows.num_scheduled_np
        num_tokens_np = rows.num_tokens_np
        # The tokens that the host knows, and the pending ones if the last step drew the last one.
        is_on_device_np = self._rows.prev_sampled_idx_np[rows_np] >= 0
        num_available_np = num_tokens_np + rows.num_pending_np * is_on_device_np
        # A burst draws all tokens after the first one itself, so that must be the request's last.
        num_given_np = np.minimum(num_scheduled_np, 1) if is_burst else num_scheduled_np
        given_ends_np = rows.num_computed_np + num_given_np - rows.num_drafts_np
        is_bad_np = (num_scheduled_np <= rows.num_drafts_np) | (given_ends_np > num_available_np)
        # The token before drafts must be the last one too.
        must_be_last_np = True if is_burst else rows.num_drafts_np > 0
        is_bad_np |= must_be_last_np & (given_ends_np < num_available_np)
        # Of the tokens that the host does not know, the device keeps only the last one.
        num_from_device_np = given_ends_np - np.maximum(rows.num_computed_np, num_tokens_np)
        is_bad_np |= (num_from_device_np > 0) & (rows.num_computed_np < num_available_np - 1)
        tables = self._rows.block_tables.tables
        seq_lens_np = rows.num_computed_np + num_scheduled_np
        for table, block_size in zip(tables, self._block_sizes, strict=True):
            if block_size is None:
                is_bad_np |= table.num_blocks_np[rows_np] == 0
            else:
                is_bad_np |= seq_lens_np > table.num_blocks_np[rows_np] * block_size
        if is_bad_np.any():
            bad = int(is_bad_np.argmax())
            num_blocks = [int(table.num_blocks_np[rows_np[bad]]) for table in tables]
            raise InvariantError(
                f"request {rows.req_ids[bad]!r} cannot compute {num_scheduled_np[bad]} tokens up "
                f"to position {seq_lens_np[bad]}: it has {num_tokens_np[bad]} tokens on the host, "
                f"{num_available_np[bad]} in all and {num_blocks} blocks of "
                f"{list(self._block_sizes)} tokens per group (None: a slot of states)."
            )

    def _check_written_blocks(self, rows: ScheduledRows) -> None:
        """Checks that no token is written to the null block, which must stay zero.

        Before a sliding window, a table has null blocks, or blocks that have been freed and may
        belong to another request. Attention masks these positions. No token is written there,
        because a position that is still to be computed is never before the window.
        """
        tables = self._rows.block_tables.tables
        for group_idx, (table, block_size) in enumerate(
            zip(tables, self._block_sizes, strict=True)
        ):
            if block_size is None:  # `_check` has checked the slots
                continue
            block_ids_np = table.block_ids_np[rows.row_of_token_np, rows.positions_np // block_size]
            if not block_ids_np.all():
                bad = int((block_ids_np == 0).argmax())
                raise InvariantError(
                    f"request {rows.req_ids[rows.req_of_token_np[bad]]!r} would write position "
                    f"{rows.positions_np[bad]} to the null block in KV cache group {group_idx}."
                )


def _count_drafts(
    scheduler_output: SchedulerOutput, req_ids: list[str]
) -> np.ndarray:  # i32[len(req_ids)]
    drafts = scheduler_output.scheduled_spec_decode_tokens
    if not drafts:
        return np.zeros(len(req_ids), np.int32)
    return np.array([len(drafts.get(req_id, ())) for req_id in req_ids], np.int32)


def _following_ids(rows: ScheduledRows, shape: StepShape) -> np.ndarray:
    """See `BuiltStep.following_ids_np`."""
    ends_np = rows.num_computed_np + rows.num_scheduled_np
    is_known_np = ends_np < rows.num_tokens_np
    places_np = np.where(is_known_np, ends_np, 0)
    following_ids_np = np.zeros(shape.num_reqs, np.int32)
    following_ids_np[: len(ends_np)] = np.where(
        is_known_np, rows.token_ids_np[rows.rows_np, places_np], 0
    )
    return following_ids_np


def _variants_of(features: Sequence[FeatureStep]) -> tuple[StepVariant, ...]:
    return tuple(feature.variant for feature in features if feature.variant is not None)


def _fill_features(features: Sequence[FeatureStep], views: dict[str, np.ndarray]) -> None:
    for feature in features:
        if feature.variant is not None:
            feature.fill(views)


def _make_buffer(shape: StepShape | BurstShape) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Makes a step's buffer i32[num_words], which is zero, and returns it with its fields.

    Each step needs a new buffer, because on a CPU the device reads this memory while the step runs.
    """
    layout = PackedLayout(shape)
    packed_np = np.zeros(layout.num_words, np.int32)
    return packed_np, layout.views(packed_np)
