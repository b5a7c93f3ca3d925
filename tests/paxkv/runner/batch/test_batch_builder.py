"""Rows become the packed arrays of a step, with padding that the device ignores."""

import dataclasses

import numpy as np
import pytest

from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.scheduler_output import (
    CachedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from paxkv.errors import InvariantError
from paxkv.runner.batch.batch_builder import BatchBuilder
from paxkv.runner.batch.input_batch import InputBatch
from paxkv.runner.drafters.burst_draft_pacer import BurstDraftPacer
from paxkv.runner.features.base import FeatureStep, StepFeature
from paxkv.runner.features.drafts import Drafts
from paxkv.runner.features.prompt_logprobs import PromptLogprobsVariant
from paxkv.runner.shapes.packed_layout import PackedLayout
from paxkv.runner.shapes.program_shapes import BurstShape, NgramShape, TableShape
from paxkv.runner.shapes.sampling_row import ROW
from paxkv.runner.shapes.step_buckets import StepBuckets
from paxkv.runner.shapes.step_variant import StepVariant
from tests.paxkv.no_cached import NO_CACHED

MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE = 4, 32, 8


def table_shape(num_groups=1, block_size=BLOCK_SIZE):
    return TableShape(
        num_groups=num_groups,
        max_blocks_per_req=MAX_MODEL_LEN // block_size,
        block_size=block_size,
    )


ONE_GROUP = (table_shape(),)
# A group with blocks of 8 tokens, and one with blocks of 16.
TWO_BLOCK_SIZES = (*ONE_GROUP, table_shape(block_size=2 * BLOCK_SIZE))


def make_batch_and_builder(tables=ONE_GROUP, features=(), max_draws=1, burst_drafts=None):
    batch = InputBatch.create(
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=MAX_MODEL_LEN,
        tables=tables,
        num_blocks=20,
        vocab_size=100,
        seed=0,
    )
    buckets = StepBuckets(
        max_num_batched_tokens=16,
        max_num_seqs=MAX_NUM_SEQS,
        max_decode_burst=4,
        tables=tables,
        max_model_len=MAX_MODEL_LEN,
        max_draws=max_draws,
        burst_drafts=burst_drafts,
        feature_variants=[feature.variants() for feature in features],
    )
    builder = BatchBuilder(
        buckets=buckets,
        input_batch=batch,
        max_num_seqs=MAX_NUM_SEQS,
        features=features,
    )
    return batch, builder


def output(num_scheduled, new_reqs=(), cached=NO_CACHED, num_decode_steps=1):
    return SchedulerOutput(
        scheduled_new_reqs=list(new_reqs),
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=num_scheduled,
        total_num_scheduled_tokens=sum(num_scheduled.values()),
        preempted_req_ids=frozenset(),
        finished_req_ids=frozenset(),
        num_decode_steps=num_decode_steps,
    )


def running(*rows):
    """Requests `(req_id, num_computed_tokens)` that ran before and get no block."""
    return CachedRequestData(
        req_ids=[req_id for req_id, _ in rows],
        resumed_req_ids=frozenset(),
        new_block_ids=[None] * len(rows),
        num_computed_tokens=[num_computed for _, num_computed in rows],
        num_output_tokens=[0] * len(rows),
        all_token_ids={},
    )


def new(req_id, tokens, blocks, num_computed=0, other_groups=(), **params):
    return NewRequestData(
        req_id=req_id,
        prompt_token_ids=list(tokens),
        sampling_params=SamplingParams(**params),
        block_ids=(list(blocks), *map(list, other_groups)),
        num_computed_tokens=num_computed,
    )


def build(builder, batch, scheduler_output):
    batch.update(scheduler_output)
    built = builder.build(scheduler_output)
    return built, PackedLayout(built.shape).views(built.packed_np)


def test_worked_example():
    """A whole prompt of 3, a chunk (2 of 9 tokens, 4 cached), a decode: 6 tokens, padded to 16."""
    batch, builder = make_batch_and_builder()
    new_reqs = [
        new("prompt", [11, 12, 13], [5]),
        new("idle", [1], [6]),
        new("chunk", range(20, 29), [7, 3], 4, temperature=0.5, seed=9),
        new("decode", range(40, 52), [8, 9], 11),
    ]
    num_scheduled = {"decode": 1, "prompt": 3, "chunk": 2}
    built, views = build(builder, batch, output(num_scheduled, new_reqs))
    assert built.req_ids == ["decode", "prompt", "chunk"]
    assert built.shape.num_tokens == 16 and built.shape.num_reqs == 4
    assert built.num_padded_tokens == 10
    assert views["token_ids"].tolist() == [51, 11, 12, 13, 24, 25] + [0] * 10
    assert views["token_source"].tolist() == [MAX_NUM_SEQS] * 16
    assert views["positions"].tolist() == [11, 0, 1, 2, 4, 5] + [0] * 10
    assert views["query_start_loc"].tolist() == [0, 1, 4, 6, 6]
    assert views["seq_lens"].tolist() == [12, 3, 6, 0]
    assert views["block_tables_0"].tolist() == [
        [[8, 9, 0, 0], [5, 0, 0, 0], [7, 3, 0, 0], [0, 0, 0, 0]]
    ]
    assert views["logits_indices"].tolist() == [0, 3, 5, 0]
    assert views["draw_position"].tolist() == [12, 3, 0, 0]  # the last draws nothing
    assert built.num_drawn_np.tolist() == [1, 1, 0]
    chunk_row_np = batch.requests["chunk"].sampling_row_np.copy()
    chunk_row_np[ROW] = batch.requests["chunk"].row_idx
    np.testing.assert_array_equal(views["sampling_rows"][2], chunk_row_np)
    assert not views["sampling_rows"][3].any()  # an empty row is greedy and filters nothing


def test_each_step_has_its_own_buffer():
    batch, builder = make_batch_and_builder()
    scheduled = output({"a": 1}, [new("a", [1, 2], [1])])
    first, _ = build(builder, batch, scheduled)
    second = builder.build(scheduled)
    assert not np.shares_memory(first.packed_np, second.packed_np)
    assert not np.shares_memory(first.packed_np, batch.token_ids_np)


def test_step_of_one_token_each_is_a_burst_of_one_step():
    """A decode, and one token in the middle of a prompt, which draws nothing."""
    batch, builder = make_batch_and_builder()
    new_reqs = [new("decode", [4, 5, 6], [7], 2), new("chunk", range(20, 29), [8, 9], 3)]
    built, views = build(builder, batch, output({"decode": 1, "chunk": 1}, new_reqs))
    assert built.shape == builder._buckets.burst_shape_for(2)
    assert built.num_padded_tokens == 2
    assert views["num_steps"].tolist() == [1]
    assert views["num_tokens"].tolist() == [1, 1, 0, 0]
    assert views["token_ids"].tolist() == [6, 23, 0, 0]
    assert views["positions"].tolist() == [2, 3, 0, 0]
    assert built.num_drawn_np.tolist() == [1, 0]


def test_burst():
    """Rows with 3 and 1 tokens left, one of them with tokens that end it."""
    batch, builder = make_batch_and_builder()
    ending = dataclasses.replace(new("a", [4, 5, 6], [7], 2), ending_token_ids=(30, 31))
    new_reqs = [ending, new("b", range(20, 27), [8], 6)]
    scheduled = output({"a": 3, "b": 1}, new_reqs, num_decode_steps=3)
    built, views = build(builder, batch, scheduled)
    assert built.shape == builder._buckets.burst_shape_for(2)
    assert built.num_padded_tokens == 3 * 4 - 4
    assert views["num_steps"].tolist() == [3]
    assert views["num_tokens"].tolist() == [3, 1, 0, 0]
    assert views["token_ids"].tolist() == [6, 26, 0, 0]
    assert views["positions"].tolist() == [2, 6, 0, 0]
    assert views["ending_ids"][:2].tolist() == [[30, 31] + [-1] * 6, [-1] * 8]
    assert views["first_end"][:2].tolist() == [2, 6]
    assert built.num_drawn_np.tolist() == [3, 1]


def with_drafts(scheduled, drafts):
    return dataclasses.replace(scheduled, scheduled_spec_decode_tokens=drafts)


def test_each_draft_adds_a_row_of_logits():
    """A decode with 2 drafts, a chunk of a prompt, and a decode without drafts."""
    batch, builder = make_batch_and_builder(max_draws=4)
    new_reqs = [
        new("a", [11, 12, 13], [5], 2),
        new("chunk", range(20, 29), [7, 3], 4),
        new("b", [40, 41], [8], 1),
    ]
    scheduled = output({"a": 3, "chunk": 2, "b": 1}, new_reqs)
    built, views = build(builder, batch, with_drafts(scheduled, {"a": [77, 78]}))
    assert views["token_ids"][:6].tolist() == [13, 77, 78, 24, 25, 41]
    assert views["positions"][:6].tolist() == [2, 3, 4, 4, 5, 1]
    assert views["logits_indices"][:5].tolist() == [0, 1, 2, 4, 5]
    assert views["draw_position"].tolist() == [3, 4, 5, 0, 2] + [0] * 3
    assert views["draw_idx"][:5].tolist() == [0, 1, 2, 0, 0]
    assert views["draw_req"][:5].tolist() == [0, 0, 0, 1, 2]
    assert views["sampling_rows"][:5, ROW].tolist() == [0, 0, 0, 1, 2]
    assert built.num_drawn_np.tolist() == [3, 0, 1]
    assert built.first_draw_np.tolist() == [0, 3, 4]


def test_a_request_waits_until_its_drafts_are_verified():
    batch, builder = make_batch_and_builder(max_draws=4)
    scheduled = output({"a": 2, "b": 1}, [new("a", [1], [5]), new("b", [2], [6])])
    built, _ = build(builder, batch, with_drafts(scheduled, {"a": [7]}))
    batch.record_drawn(built.rows_np, built.num_drawn_np, built.num_drafts_np)
    with pytest.raises(InvariantError, match="'a' cannot compute 1 tokens up to position 2"):
        build(builder, batch, output({"a": 1}, cached=running(("a", 1))))
    _, views = build(builder, batch, output({"b": 1}, cached=running(("b", 1))))
    # The first draw of the request at place 1.
    assert views["token_source"][0] == 1


@pytest.mark.parametrize("num_computed", [0, 2])
def test_drafts_must_follow_the_last_token(num_computed):
    batch, builder = make_batch_and_builder(max_draws=4)
    scheduled = output({"a": 2}, [new("a", [1, 2], [5], num_computed)])
    with pytest.raises(InvariantError, match="'a' cannot compute 2 tokens"):
        build(builder, batch, with_drafts(scheduled, {"a": [7]}))


def test_token_known_only_to_the_device_is_read_from_the_device():
    batch, builder = make_batch_and_builder()
    first, _ = build(
        builder, batch, output({"a": 1, "b": 2}, [new("a", [1, 2], [1]), new("b", [3, 4], [2])])
    )
    assert first.num_drawn_np.tolist() == [0, 1]
    batch.record_drawn(first.rows_np, first.num_drawn_np)
    cached = running(("a", 1), ("b", 2))
    built, views = build(builder, batch, output({"a": 1, "b": 1}, cached=cached))
    # "a" computes its last prompt token, "b" the token that was drawn at place 1 of the last step.
    assert views["token_source"][:2].tolist() == [MAX_NUM_SEQS, 1]
    assert views["token_ids"][0] == 2
    assert views["positions"][:2].tolist() == [1, 2]
    assert built.num_drawn_np.tolist() == [1, 1]


def test_token_drawn_before_the_last_step_is_nowhere():
    batch, builder = make_batch_and_builder()
    new_reqs = [new("a", [1, 2], [1]), new("b", [3, 4], [2])]
    for req_id in "ab":
        scheduled = output({req_id: 2}, [r for r in new_reqs if r.req_id == req_id])
        built, _ = build(builder, batch, scheduled)
        batch.record_drawn(built.rows_np, built.num_drawn_np)
    with pytest.raises(InvariantError, match="'a' cannot compute 1 tokens up to position 3"):
        build(builder, batch, output({"a": 1}, cached=running(("a", 2))))
    _, views = build(builder, batch, output({"b": 1}, cached=running(("b", 2))))
    assert views["token_source"][0] == 0


def test_a_row_within_its_prompt_draws_nothing_in_a_burst():
    batch, builder = make_batch_and_builder()
    new_reqs = [new("a", [4, 5, 6], [7]), new("b", [8], [9])]
    built, views = build(builder, batch, output({"a": 1, "b": 1}, new_reqs))
    assert isinstance(built.shape, BurstShape)
    assert views["draws"].tolist() == [0, 1, 0, 0]


def test_rows_that_need_the_host_to_draw_leave_their_logits():
    batch, builder = make_batch_and_builder()
    bound = dataclasses.replace(new("a", [4], [7]), needs_grammar=True)
    built, views = build(builder, batch, output({"a": 1, "b": 1}, [bound, new("b", [8], [9])]))
    assert isinstance(built.shape, BurstShape)
    assert built.leaves_logits and views["leaves_logits"].tolist() == [1]
    batch.record_drawn(built.rows_np, built.num_drawn_np)
    scheduled = output({"a": 2}, cached=running(("a", 1)), num_decode_steps=2)
    with pytest.raises(InvariantError, match="needs the host between its tokens"):
        build(builder, batch, scheduled)
    built, views = build(builder, batch, output({"b": 1}, cached=running(("b", 1))))
    assert not built.leaves_logits and views["leaves_logits"].tolist() == [0]


def test_only_the_last_token_of_a_burst_is_on_the_device():
    batch, builder = make_batch_and_builder()
    first, _ = build(builder, batch, output({"a": 3}, [new("a", [1], [1])], num_decode_steps=3))
    batch.record_drawn(first.rows_np, first.num_drawn_np)
    for num_computed in (1, 2, 4):
        scheduled = output({"a": 1}, cached=running(("a", num_computed)))
        with pytest.raises(InvariantError, match="it has 1 tokens on the host, 4 in all"):
            build(builder, batch, scheduled)
    _, views = build(builder, batch, output({"a": 1}, cached=running(("a", 3))))
    assert views["token_source"][0] == 0 and views["positions"][0] == 3


@pytest.mark.parametrize(
    ("num_scheduled", "num_computed", "message"),
    [
        (2, 0, "it has 2 tokens on the host"),  # the burst begins before the last token
        (5, 1, "a burst has at most 4 steps, got 5"),
        (9, 1, r"\[1\] blocks of \[8\]"),
    ],
)
def test_burst_that_cannot_be_computed_is_a_bug(num_scheduled, num_computed, message):
    batch, builder = make_batch_and_builder()
    scheduled = output(
        {"a": num_scheduled},
        [new("a", [1, 2], [1], num_computed)],
        num_decode_steps=num_scheduled,
    )
    with pytest.raises(InvariantError, match=message):
        build(builder, batch, scheduled)


def test_burst_that_would_write_to_the_null_block_is_a_bug():
    batch, builder = make_batch_and_builder()
    scheduled = output({"a": 3}, [new("a", range(7), [4, 0], 6)], num_decode_steps=3)
    with pytest.raises(InvariantError, match="'a' would write position 8 to the null block"):
        build(builder, batch, scheduled)


@pytest.mark.parametrize(
    ("num_scheduled", "message"),
    [
        (3, "it has 2 tokens on the host"),  # a token that neither host nor device has
        (0, "cannot compute 0 tokens"),
    ],
)
def test_step_over_tokens_that_do_not_exist_is_a_bug(num_scheduled, message):
    batch, builder = make_batch_and_builder()
    scheduled = output({"a": num_scheduled}, [new("a", [1, 2], [1])])
    with pytest.raises(InvariantError, match=message):
        build(builder, batch, scheduled)


def test_step_over_positions_without_a_block_is_a_bug():
    batch, builder = make_batch_and_builder()
    scheduled = output({"a": 9}, [new("a", range(9), [1])])
    with pytest.raises(InvariantError, match=r"\[1\] blocks of \[8\]"):
        build(builder, batch, scheduled)


def test_groups_have_block_tables_and_block_sizes_of_their_own():
    """The last group's blocks are twice as long, and its first has left a window."""
    tables = (table_shape(num_groups=2), table_shape(block_size=2 * BLOCK_SIZE))
    batch, builder = make_batch_and_builder(tables)
    new_req = new("a", range(20), [5, 6, 7], 18, other_groups=[[1, 2, 3], [0, 9]])
    _, views = build(builder, batch, output({"a": 2}, [new_req]))
    assert views["block_tables_0"][:, 0].tolist() == [[5, 6, 7, 0], [1, 2, 3, 0]]
    assert views["block_tables_1"][:, 0].tolist() == [[0, 9]]
    assert views["seq_lens"].tolist() == [20, 0, 0, 0]


def test_burst_has_the_block_tables_of_groups_of_every_block_size():
    batch, builder = make_batch_and_builder(TWO_BLOCK_SIZES)
    new_req = new("a", range(20), [5, 6, 7], 19, other_groups=[[8, 9]])
    built, views = build(builder, batch, output({"a": 2}, [new_req], num_decode_steps=2))
    assert isinstance(built.shape, BurstShape)
    assert views["block_tables_0"][:, 0].tolist() == [[5, 6, 7, 0]]
    assert views["block_tables_1"][:, 0].tolist() == [[8, 9]]


def test_missing_block_of_any_group_is_a_bug():
    batch, builder = make_batch_and_builder(TWO_BLOCK_SIZES)
    scheduled = output({"a": 17}, [new("a", range(17), [5, 6, 7], other_groups=[[9]])])
    batch.update(scheduled)
    with pytest.raises(InvariantError, match=r"\[3, 1\] blocks of \[8, 16\]"):
        builder.build(scheduled)


def test_write_to_the_null_block_is_a_bug():
    batch, builder = make_batch_and_builder([table_shape(num_groups=2)])
    new_reqs = [new("b", [1], [1], other_groups=[[2]])]
    new_reqs.append(new("a", range(12), [5, 6], 7, other_groups=[[0, 9]]))
    scheduled = output({"b": 1, "a": 3}, new_reqs)
    batch.update(scheduled)
    message = "'a' would write position 7 to the null block in KV cache group 1"
    with pytest.raises(InvariantError, match=message):
        builder.build(scheduled)


VARIANT = PromptLogprobsVariant(num_logits=0)


@dataclasses.dataclass(frozen=True)
class PlannedStep(FeatureStep):
    """The step of `PlannedFeature`."""

    variant: StepVariant | None


class PlannedFeature(StepFeature):
    """Plans what the test says."""

    def __init__(self, planned):
        self.planned = planned

    def variants(self):
        return (VARIANT,)

    def plan(self, step):
        return self.planned


def test_burst_has_no_variant_of_a_feature():
    feature = PlannedFeature(PlannedStep(VARIANT))
    batch, builder = make_batch_and_builder(features=[feature])
    burst = output({"a": 2}, [new("a", [1, 2, 3], [5], 2)], num_decode_steps=2)
    batch.update(burst)
    with pytest.raises(
        InvariantError,
        match="in a burst of 2 steps: one needs the features .*PromptLogprobsVariant",
    ):
        builder.build(burst)
    feature.planned = PlannedStep(None)
    built = builder.build(burst)
    assert isinstance(built.shape, BurstShape) and built.features == (feature.planned,)


@pytest.mark.parametrize(("num_drafts", "verifies_drafts"), [(3, True), (4, False)])
def test_burst_without_room_for_drafts_is_measured_as_a_plain_burst(
    monkeypatch, num_drafts, verifies_drafts
):
    """A step has 16 rows of logits. A burst of 2 to 4 requests needs 20 for 4 drafts each."""
    pacer, recorded = BurstDraftPacer(), []
    monkeypatch.setattr(pacer, "choose", lambda num_reqs, num_decode_steps: True)
    monkeypatch.setattr(pacer, "record_step", lambda **step: recorded.append(step))
    drafts = Drafts(None, max_drafts=4, pacer=None, are_in_bursts=True, burst_pacer=pacer)
    ngram = NgramShape(num_drafts=num_drafts, shortest=1, longest=2)
    batch, builder = make_batch_and_builder(
        features=[drafts], max_draws=1 + num_drafts, burst_drafts=ngram
    )
    new_reqs = [new("a", [1, 2], [5], 1), new("b", [1, 2], [6], 1)]
    burst = output({"a": 2, "b": 2}, new_reqs, num_decode_steps=2)
    built, _ = build(builder, batch, burst)
    assert (built.shape.drafts is not None) == verifies_drafts
    drawn = ModelRunnerOutput(
        req_ids=["a", "b"], sampled_token_ids=[[3, 4], [3, 4]], logprobs=[None] * 2
    )
    built.features[0].finish(drawn, {})
    assert [step["verifies_drafts"] for step in recorded] == [verifies_drafts]


class HeadVariant(StepVariant):
    is_in_every_program = True
    reads_tenancies = True


def test_a_row_has_another_tenancy_after_its_request_ended():
    feature = PlannedFeature(PlannedStep(None))
    feature.variants = lambda: (HeadVariant(),)
    batch, builder = make_batch_and_builder(features=[feature])
    new_reqs = [new("a", [1, 2, 3], [5]), new("b", [1, 2, 3], [6])]
    _, first = build(builder, batch, output({"b": 3, "a": 3}, new_reqs))
    rows_np, tenancies_np = first["tenancies"][:, :2]
    assert rows_np.tolist() == [1, 0]
    # "b" keeps its tenancy. "c" gets the row of "a".
    decided = output({"b": 2, "c": 2}, [new("c", [1, 2, 3], [7], 2)], running(("b", 3)), 2)
    batch.record_drawn(np.array([1, 0]), np.array([1, 1]))
    _, views = build(builder, batch, dataclasses.replace(decided, finished_req_ids={"a"}))
    assert views["tenancies"][0, :2].tolist() == [1, 0]
    assert views["tenancies"][1, 0] == tenancies_np[0]
    assert views["tenancies"][1, 1] not in [0, *tenancies_np]


def test_feature_sees_every_burst_until_it_plans_nothing():
    feature = PlannedFeature(PlannedStep(None))
    batch, builder = make_batch_and_builder(features=[feature])
    decided = output({"a": 1}, [new("a", [1, 2, 3], [5], 2)])
    seen = []
    for position in range(3, 7):
        built, _ = build(builder, batch, decided)
        batch.record_drawn(built.rows_np, built.num_drawn_np)
        seen.append(built.features)
        feature.planned = PlannedStep(None) if position == 3 else None
        decided = output({"a": 1}, cached=running(("a", position)))
    assert seen == [(PlannedStep(None),), (PlannedStep(None),), (), ()]


def test_states_have_a_slot_to_read_and_a_slot_to_write():
    """Two parts of two blocks. Request "a" goes on in another slot, "b" stays in its own."""
    state = TableShape(num_groups=2, max_blocks_per_req=2, block_size=BLOCK_SIZE, is_state=True)
    batch, builder = make_batch_and_builder((*ONE_GROUP, state))
    new_reqs = [
        new("a", range(20, 29), [7, 3], 8, other_groups=[[10, 11, 12, 13, 14, 15, 16, 17]]),
        new("b", [1, 2], [9], other_groups=[[1, 2, 4, 5]]),
    ]
    _, views = build(builder, batch, output({"a": 1, "b": 2}, new_reqs))
    (packed_np,) = batch.block_tables.slot_tables[0].pack_new_slots()
    blocks = {row[0]: row[1:] for row in packed_np.tolist()} | {0: [0, 0, 0, 0]}
    reads_np, writes_np = views["block_tables_1"]
    first, second, of_b = [10, 11, 12, 13], [14, 15, 16, 17], [1, 2, 4, 5]
    assert [blocks[slot] for slot in reads_np[:3].tolist()] == [first, of_b, [0, 0, 0, 0]]
    assert [blocks[slot] for slot in writes_np[:3].tolist()] == [second, of_b, [0, 0, 0, 0]]

    batch.record_drawn(batch.rows_of(["a", "b"]), np.array([1, 1], np.int32))
    later = output({"a": 2, "b": 2}, cached=running(("a", 9), ("b", 2)), num_decode_steps=2)
    later = dataclasses.replace(later, slot_switches={"b": 3})
    _, views = build(builder, batch, later)
    reads_np, writes_np = views["block_tables_1"]
    assert (reads_np == writes_np).all()
    assert [blocks[slot] for slot in writes_np[:2].tolist()] == [second, of_b]
    assert views["slot_switch"][:2].tolist() == [9, 3]
