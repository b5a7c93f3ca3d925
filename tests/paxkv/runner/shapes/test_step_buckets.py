"""Buckets cover every step and are few."""

import dataclasses

import pytest

from models import Wants
from paxkv.errors import InvariantError
from paxkv.runner.features.prompt_logprobs import PromptLogprobsVariant
from paxkv.runner.shapes.bucket_sizes import token_buckets
from paxkv.runner.shapes.program_shapes import (
    DraftShape,
    NgramShape,
    SamplerShape,
    StepShape,
    TableShape,
)
from paxkv.runner.shapes.step_buckets import StepBuckets
from paxkv.runner.shapes.step_variant import StepVariant

TABLE = TableShape(num_groups=1, max_blocks_per_req=5, block_size=8)


def make_buckets(max_num_batched_tokens=48, max_num_seqs=6, tables=(TABLE,), **settings):
    return StepBuckets(
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_decode_burst=8,
        tables=tables,
        max_model_len=5 * 8,
        **settings,
    )


@pytest.mark.parametrize(("budget", "max_num_seqs"), [(512, 64), (2048, 256), (48, 6), (5, 9)])
def test_shared_programs_compute_what_programs_of_their_own_would(budget, max_num_seqs):
    settings = {"max_num_batched_tokens": budget, "max_num_seqs": max_num_seqs}
    own, shared = make_buckets(**settings), make_buckets(**settings, shares_programs=True)
    for num_tokens in range(1, budget + 1):
        step = shared.shape_for(num_tokens)
        assert step in shared.step_shapes and step.num_tokens >= num_tokens
        wanted = own.shape_for(num_tokens).num_computed(num_tokens)
        assert step.num_computed(num_tokens) == wanted
    for num_reqs in range(1, max_num_seqs + 1):
        burst = shared.burst_shape_for(num_reqs)
        assert burst in shared.burst_shapes and burst.num_reqs >= num_reqs
        wanted = own.burst_shape_for(num_reqs).num_computed(num_reqs)
        assert burst.num_computed(num_reqs) == wanted


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_each_step_has_a_program_of_the_draft_head(batch_invariant):
    buckets = make_buckets(
        max_draws=4,
        has_draft_head=True,
        always_drafts=True,
        batch_invariant=batch_invariant,
        feature_variants=[[PromptLogprobsVariant(num_logits=0)]],
    )
    steps = [shape for shape in buckets.largest_first if isinstance(shape, StepShape)]
    drafts = [shape for shape in buckets.largest_first if isinstance(shape, DraftShape)]
    assert {shape.step for shape in drafts} == set(steps) and len(drafts) == len(steps)
    for step in steps:
        draft = buckets.draft_shape_for(step)
        assert draft.num_drafts == 3
        assert draft.token_widths in ((), step.widths, token_buckets(step.num_tokens))
    assert not buckets.has_bursts
    assert make_buckets(max_draws=4, has_draft_head=True).has_bursts
    assert make_buckets(max_draws=4).draft_shape_for(steps[0]) is None


def test_steps_without_drafts_compute_no_more_than_without_a_drafter():
    plain = make_buckets()
    buckets = make_buckets(max_draws=4, has_draft_head=True, feature_variants=[[HeadVariant()]])
    for num_tokens in range(1, 49):
        drafting, own = buckets.shape_for(num_tokens), plain.shape_for(num_tokens)
        step = buckets.shape_for(num_tokens, has_drafts=False)
        # The sampler reads rows with the columns of drafts after all steps.
        assert step == dataclasses.replace(
            own, max_draws=4, num_tokens=step.num_tokens, num_reqs=step.num_reqs
        )
        assert step.num_tokens == drafting.num_tokens and step.num_reqs == drafting.num_reqs
        assert drafting.features == (HeadVariant(),) and drafting.num_logits >= step.num_logits
        assert buckets.draft_shape_for(step) is None
        assert {step, drafting, buckets.draft_shape_for(drafting)} <= set(buckets.largest_first)
    assert [shape.features for shape in buckets.burst_shapes] == [()] * len(buckets.burst_shapes)
    for settings in ({"batch_invariant": True}, {"always_drafts": True}):
        one_kind = make_buckets(max_draws=4, feature_variants=[[HeadVariant()]], **settings)
        assert one_kind.shape_for(9, has_drafts=False) == one_kind.shape_for(9)


def test_shared_programs_are_ten_by_default():
    features = [[PromptLogprobsVariant(num_logits=0)]]
    buckets = make_buckets(512, 64, shares_programs=True, feature_variants=features)
    assert len(buckets.largest_first) == 10


@pytest.mark.parametrize(("budget", "max_num_seqs"), [(512, 64), (2048, 256)])
def test_programs_are_few(budget, max_num_seqs):
    buckets = make_buckets(max_num_batched_tokens=budget, max_num_seqs=max_num_seqs)
    # Programs with a model take seconds to compile, the others at most one second.
    assert len(buckets.step_shapes) + len(buckets.burst_shapes) <= 17
    assert len(buckets.largest_first) <= 23
    assert len(set(buckets.largest_first)) == len(buckets.largest_first)


@pytest.mark.parametrize("num_tokens", range(1, 49))
def test_step_gets_smallest_shape_that_holds_its_tokens_and_requests(num_tokens):
    buckets = make_buckets()
    shape = buckets.shape_for(num_tokens)
    assert num_tokens <= shape.num_tokens < 2 * num_tokens or shape.num_tokens == 16
    # As many requests as tokens may be scheduled, up to max_num_seqs.
    assert shape.num_reqs == shape.num_logits >= min(num_tokens, 6)
    assert shape.tables == (TABLE,)
    assert shape in buckets.step_shapes


@pytest.mark.parametrize("num_reqs", range(1, 7))
def test_burst_gets_smallest_shape_that_holds_its_requests(num_reqs):
    buckets = make_buckets()
    shape = buckets.burst_shape_for(num_reqs)
    assert num_reqs <= shape.num_reqs
    assert not any(num_reqs <= s.num_reqs < shape.num_reqs for s in buckets.burst_shapes)
    assert (shape.max_steps, shape.tables) == (8, (TABLE,))


def test_largest_shapes_are_the_budget_and_all_requests():
    step, burst, copies, sampler, row = make_buckets().largest
    assert (step.num_tokens, burst.num_reqs, copies.num_copies) == (48, 6, 6)
    assert (sampler, row) == (make_buckets().sampler_shape, make_buckets().row_shape)


@dataclasses.dataclass(frozen=True)
class Variant(StepVariant):
    """A variant of a step feature."""

    name: str


def test_features_that_may_meet_have_one_shape_of_the_largest_step():
    a, b, c = map(Variant, "abc")
    plain, buckets = make_buckets(), make_buckets(feature_variants=[[a, b], [c]])
    expected = [
        dataclasses.replace(plain.step_shapes[-1], features=features)
        for features in [(a, c), (a,), (b, c), (b,), (c,)]
    ]
    assert list(buckets.largest_first) == [*expected, *plain.largest_first]
    assert set(buckets.largest) == {*expected, *plain.largest}
    for shape in expected:
        assert buckets.shape_for(1, shape.features) == shape
        assert buckets.shape_for(48, shape.features) == shape
    assert buckets.shape_for(1) == plain.shape_for(1)


class LonelyVariant(Variant):
    """Never in a step with a variant of another feature."""

    def may_meet(self, other):
        return False


def test_only_features_that_may_meet_are_combined():
    a, b, c = Variant("a"), LonelyVariant("b"), Variant("c")
    buckets = make_buckets(feature_variants=[[a], [b], [c]])
    found = {shape.features for shape in buckets.largest_first if isinstance(shape, StepShape)}
    assert found == {(), (a,), (b,), (c,), (a, c)}
    with pytest.raises(InvariantError, match="cannot have these features together"):
        buckets.shape_for(1, (a, b))


class BurstVariant(Variant):
    """Takes part in bursts of every size."""

    is_in_bursts = has_every_bucket = True


def test_features_in_bursts_have_bursts_of_every_size():
    a, b = BurstVariant("a"), Variant("b")
    plain, buckets = make_buckets(), make_buckets(feature_variants=[[a], [b]])
    bursts = tuple(dataclasses.replace(shape, features=(a,)) for shape in plain.burst_shapes)
    assert [buckets.burst_shape_for(count, (a,)) for count in (1, 6)] == [bursts[0], bursts[-1]]
    assert set(bursts) <= set(buckets.largest_first) and bursts[-1] in buckets.largest
    assert [buckets.can_burst(features) for features in ((), (a,), (b,), (a, b))] == [
        *(True, True),
        *(False, False),
    ]
    with pytest.raises(InvariantError, match="a burst cannot have these features"):
        buckets.burst_shape_for(1, (a, b))
    # Batch-invariant steps are no bursts.
    invariant = make_buckets(feature_variants=[[a]], batch_invariant=True)
    assert not invariant.can_burst((a,)) and not invariant.can_burst(())


class ResultsInBursts(BurstVariant):
    def results(self, *, num_tokens, num_reqs):
        return {"found": (num_reqs,)}


def test_a_variant_in_bursts_with_results_is_a_bug():
    with pytest.raises(InvariantError, match=r"is in bursts, but has the results \['found'\]"):
        make_buckets(feature_variants=[[ResultsInBursts("a")]])


class FrequentVariant(Variant):
    """A variant for which every bucket is compiled."""

    has_every_bucket = True


def test_frequent_features_have_every_bucket_where_they_meet_no_rare_one():
    rare, frequent = Variant("rare"), FrequentVariant("frequent")
    plain, buckets = make_buckets(), make_buckets(feature_variants=[[rare], [frequent]])
    for num_tokens in (1, 17, 48):
        shape = buckets.shape_for(num_tokens, (frequent,))
        assert shape == dataclasses.replace(plain.shape_for(num_tokens), features=(frequent,))
        assert shape in buckets.largest_first
        assert buckets.shape_for(num_tokens, (rare, frequent)).num_tokens == 48
    assert len(buckets.largest_first) == len(plain.largest_first) + 2 + len(plain.step_shapes)
    assert len(set(buckets.largest_first)) == len(buckets.largest_first)
    assert len(buckets.largest) == len(plain.largest) + 3


def test_step_asks_for_what_its_features_need():
    buckets = make_buckets(feature_variants=[[PromptLogprobsVariant(num_logits=0)], [Variant("a")]])
    wants = [shape.wants for shape in buckets.largest_first[:3]]
    assert wants == [
        Wants(logits="last", hidden="all"),
        Wants(logits="last", hidden="all"),
        Wants(logits="last"),
    ]


@pytest.mark.parametrize(
    ("max_num_seqs", "chunk_rows", "expected"), [(6, 4, 4), (6, 8, 6), (6, None, 6)]
)
def test_sampler_has_a_row_for_every_request_and_no_chunk_is_larger(
    max_num_seqs, chunk_rows, expected
):
    buckets = make_buckets(max_num_seqs=max_num_seqs, sampled_chunk_rows=chunk_rows)
    assert buckets.sampler_shape == SamplerShape(
        num_rows=max_num_seqs, num_reqs=max_num_seqs, max_model_len=40, chunk_rows=expected
    )


@pytest.mark.parametrize("num_tokens", [0, 49])
def test_step_outside_the_budget_is_a_bug(num_tokens):
    with pytest.raises(InvariantError, match=f"1 to 48 tokens, got {num_tokens}"):
        make_buckets().shape_for(num_tokens)


@pytest.mark.parametrize("num_reqs", [0, 7])
def test_more_requests_than_may_run_are_a_bug(num_reqs):
    with pytest.raises(InvariantError, match=f"1 to 6 requests, got {num_reqs}"):
        make_buckets().burst_shape_for(num_reqs)


def test_copies_get_the_smallest_shape_that_holds_one_a_request_and_group():
    buckets = make_buckets(max_num_seqs=6, tables=(TABLE, TABLE))
    counts = {n: buckets.copy_shape_for(n).num_copies for n in (1, 8, 9, 12, 13)}
    assert counts == {1: 8, 8: 8, 9: 12, 12: 12, 13: 12}
    assert [shape.num_copies for shape in buckets.copy_shapes] == [8, 12]


def test_every_group_has_the_block_size_of_its_table():
    tables = (
        TableShape(num_groups=3, max_blocks_per_req=5, block_size=8),
        TableShape(num_groups=1, max_blocks_per_req=2, block_size=32),
    )
    assert make_buckets(tables=tables).block_sizes == (8, 8, 8, 32)


@dataclasses.dataclass(frozen=True)
class EverywhereVariant(StepVariant):
    field_names: tuple[str, ...] = ()

    @property
    def is_in_every_program(self):
        return True

    def fields(self, *, num_tokens, num_reqs):
        return dict.fromkeys(self.field_names, (num_tokens,))


@dataclasses.dataclass(frozen=True)
class HeadVariant(EverywhereVariant):
    @property
    def is_for_draft_head(self):
        return True


def test_variant_in_every_program_adds_no_program():
    everywhere, rare = EverywhereVariant(), PromptLogprobsVariant(num_logits=0)
    plain = make_buckets(feature_variants=[[rare]])
    buckets = make_buckets(feature_variants=[[everywhere], [rare]])
    assert len(buckets.largest_first) == len(plain.largest_first)
    assert all(shape.features == (everywhere,) for shape in buckets.step_shapes)
    assert all(shape.features == (everywhere,) for shape in buckets.burst_shapes)
    assert buckets.shape_for(3, (rare,)).features == (everywhere, rare)
    assert buckets.shape_for(3, (rare,)).num_tokens == plain.shape_for(3, (rare,)).num_tokens
    assert buckets.shape_for(3).num_tokens == plain.shape_for(3).num_tokens


@pytest.mark.parametrize(
    "variants",
    [[EverywhereVariant(("ids",))], [EverywhereVariant(), PromptLogprobsVariant(num_logits=0)]],
)
def test_variant_in_every_program_has_no_fields_and_no_siblings(variants):
    with pytest.raises(InvariantError, match="is in every program, but has"):
        make_buckets(feature_variants=[variants])


@pytest.mark.parametrize("shares_programs", [False, True])
def test_bursts_with_drafts_have_room_for_the_drafts_of_all_rows(shares_programs):
    ngram = NgramShape(num_drafts=3, shortest=1, longest=2)
    buckets = make_buckets(
        256, 32, burst_drafts=ngram, max_draws=4, shares_programs=shares_programs
    )
    for num_reqs in range(1, 33):
        plain = buckets.burst_shape_for(num_reqs)
        drafting = buckets.burst_shape_for(num_reqs, verifies_drafts=True)
        assert (plain.drafts, drafting.drafts) == (None, ngram)
        assert drafting.num_reqs == plain.num_reqs and drafting.num_tokens == 4 * plain.num_reqs
        assert drafting in buckets.largest_first
        # With and without drafts.
        assert num_reqs <= drafting.num_computed(num_reqs) <= drafting.num_tokens
        assert drafting.num_computed(4 * num_reqs) <= drafting.num_tokens
    assert buckets.drafting_burst_shapes[-1] in buckets.largest


def test_bursts_have_no_drafts_without_enough_rows_of_logits():
    ngram = NgramShape(num_drafts=3, shortest=1, longest=2)
    buckets = make_buckets(48, 32, burst_drafts=ngram, max_draws=4)
    found = [buckets.burst_shape_for(n, verifies_drafts=True) for n in (1, 8, 9, 32)]
    assert [shape.drafts is not None for shape in found] == [True, True, False, False]


def test_bursts_with_states_have_drafts_where_they_have_rows_of_logits():
    """Also with features in every program, whose arrays have room for two steps of tokens."""
    states = TableShape(num_groups=1, max_blocks_per_req=5, block_size=8, is_state=True)
    ngram = NgramShape(num_drafts=3, shortest=1, longest=2)
    settings = {"burst_drafts": ngram, "max_draws": 4, "feature_variants": [[HeadVariant()]]}
    buckets = make_buckets(48, 12, tables=(TABLE, states), **settings)
    found = buckets.burst_shape_for(12, verifies_drafts=True)
    assert (found.drafts, found.num_draws) == (ngram, 48)
    assert 48 < found.num_tokens <= 2 * 48
