"""Rows follow the scheduler: added, extended, preempted, resumed, dropped."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from paxkv.errors import InvariantError
from paxkv.runner.batch.input_batch import InputBatch
from paxkv.runner.sampling.sampled_tokens import NO_TOKEN
from paxkv.runner.shapes.packed_layout import MAX_ENDING_IDS
from paxkv.runner.shapes.program_shapes import TableShape
from paxkv.runner.shapes.sampling_row import ROW, SEED

MAX_NUM_SEQS, MAX_MODEL_LEN, MAX_BLOCKS, NUM_BLOCKS = 4, 12, 6, 40


def make_batch():
    return InputBatch.create(
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=MAX_MODEL_LEN,
        tables=[TableShape(num_groups=1, max_blocks_per_req=MAX_BLOCKS, block_size=2)],
        num_blocks=NUM_BLOCKS,
        vocab_size=100,
        seed=0,
    )


def new(req_id, tokens=(1, 2, 3), blocks=(1, 2), num_computed=0, **params):
    return NewRequestData(
        req_id=req_id,
        prompt_token_ids=list(tokens),
        sampling_params=SamplingParams(**params),
        block_ids=(list(blocks),),
        num_computed_tokens=num_computed,
    )


def output(new_reqs=(), cached=(), resumed=None, preempted=(), finished=()):
    """`cached` lists (req_id, new blocks or None, num_computed); `resumed` maps ids to tokens."""
    resumed = resumed or {}
    return SchedulerOutput(
        scheduled_new_reqs=list(new_reqs),
        scheduled_cached_reqs=CachedRequestData(
            req_ids=[c[0] for c in cached],
            resumed_req_ids=frozenset(resumed),
            new_block_ids=[None if c[1] is None else (list(c[1]),) for c in cached],
            num_computed_tokens=[c[2] for c in cached],
            num_output_tokens=[0 for _ in cached],
            all_token_ids=resumed,
        ),
        num_scheduled_tokens={},
        total_num_scheduled_tokens=0,
        preempted_req_ids=frozenset(preempted),
        finished_req_ids=frozenset(finished),
    )


def append(batch, req_id, *token_ids):
    """Draws the tokens on the device and fetches them at once."""
    rows_np, num_drawn_np = batch.rows_of([req_id]), np.array([len(token_ids)], np.int32)
    batch.record_drawn(rows_np, num_drawn_np)
    batch.append_tokens(rows_np, np.array(token_ids, np.int32)[:, None], num_drawn_np)


def row_contents(batch, req_id):
    """(tokens, computed, blocks) of a request, read back from its row."""
    row = int(batch.rows_of([req_id])[0])
    table = batch.block_tables.tables[0]
    num_blocks = table.num_blocks_np[row]
    assert not table.block_ids_np[row, num_blocks:].any()
    return (
        batch.token_ids_np[row, : batch.num_tokens_np[row]].tolist(),
        int(batch.num_computed_tokens_np[row]),
        table.block_ids_np[row, :num_blocks].tolist(),
    )


def test_request_keeps_its_row_while_others_come_and_go():
    batch = make_batch()
    batch.update(output([new("a"), new("b"), new("c")]))
    rows = batch.rows_of(["a", "b", "c"]).tolist()
    batch.update(output([new("d")], finished=["b"]))
    assert batch.rows_of(["a", "c"]).tolist() == [rows[0], rows[2]]
    assert batch.rows_of(["d"]).tolist() == [rows[1]]


def test_running_request_gets_its_blocks_appended_and_its_tokens_written():
    batch = make_batch()
    batch.update(output([new("a", [5, 6], [3])]))
    append(batch, "a", 7)
    batch.update(output(cached=[("a", [9], 2)]))
    assert row_contents(batch, "a") == ([5, 6, 7], 2, [3, 9])
    batch.update(output(cached=[("a", None, 3)]))
    assert row_contents(batch, "a") == ([5, 6, 7], 3, [3, 9])


def test_resumed_request_gets_a_new_table_and_all_its_tokens():
    batch = make_batch()
    batch.update(output([new("a", [5, 6], [3, 4], temperature=0.5)]))
    sampling_row_np = batch.sampling_rows_np[batch.rows_of(["a"])[0]].copy()
    batch.update(output(preempted=["a"]))
    with pytest.raises(InvariantError, match="preempted"):
        batch.rows_of(["a"])
    batch.update(output([new("b")]))
    batch.update(output(cached=[("a", [8], 1)], resumed={"a": [5, 6, 7]}))
    assert row_contents(batch, "a") == ([5, 6, 7], 1, [8])
    (row,) = batch.rows_of(["a"])
    sampling_row_np[ROW] = row  # it has moved
    np.testing.assert_array_equal(batch.sampling_rows_np[row], sampling_row_np)


def test_full_batch_swaps_requests_in_one_step():
    batch = make_batch()
    batch.update(output([new(f"old-{i}") for i in range(MAX_NUM_SEQS)]))
    batch.update(
        output(
            [new("new-0"), new("new-1")],
            finished=["old-0"],
            preempted=["old-3"],
        )
    )
    assert set(batch.requests) == {"old-1", "old-2", "old-3", "new-0", "new-1"}
    with pytest.raises(InvariantError, match="no row"):
        batch.update(output([new("new-2")]))


def test_finished_request_that_never_ran_is_ignored():
    batch = make_batch()
    batch.update(output(finished=["never-seen"]))
    assert batch.requests == {}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (output([new("a"), new("a")]), "was added before"),
        (output(cached=[("x", None, 0)]), "unknown"),
        (output([new("a", range(13))]), "1 to 12 tokens, got 13"),
        (output([new("a", [])]), "1 to 12 tokens, got 0"),
    ],
)
def test_contradicting_decision_is_a_bug(bad, message):
    with pytest.raises(InvariantError, match=message):
        make_batch().update(bad)


def test_running_a_preempted_request_without_resuming_it_is_a_bug():
    batch = make_batch()
    batch.update(output([new("a")]))
    with pytest.raises(InvariantError, match="was preempted"):
        batch.update(output(cached=[("a", None, 1)], preempted=["a"]))


def test_token_past_max_model_len_is_a_bug():
    batch = make_batch()
    batch.update(output([new("a", range(MAX_MODEL_LEN))]))
    with pytest.raises(InvariantError, match="max_model_len=12"):
        append(batch, "a", 1)
    batch = make_batch()
    batch.update(output([new("a", range(MAX_MODEL_LEN - 2))]))
    with pytest.raises(InvariantError, match=r"got \[3\] tokens"):
        append(batch, "a", 1, 2, 3)


def test_tokens_of_a_step_are_pending_until_they_arrive_even_if_fewer_do():
    batch = make_batch()
    batch.update(output([new("a", [5, 6]), new("b", [7]), new("c", [8])]))
    rows_np = batch.rows_of(["c", "a"])
    batch.record_drawn(rows_np, np.array([3, 2], np.int32))
    assert batch.num_pending_np[batch.rows_of(["a", "b", "c"])].tolist() == [2, 0, 3]
    assert batch.prev_sampled_idx_np[batch.rows_of(["a", "b", "c"])].tolist() == [1, -1, 0]
    drawn_np = np.array([[30, 31], [32, NO_TOKEN], [34, NO_TOKEN]], np.int32)
    batch.append_tokens(rows_np, drawn_np, np.array([3, 2], np.int32))
    assert not batch.num_pending_np.any()
    assert row_contents(batch, "c")[0] == [8, 30, 32, 34]
    assert row_contents(batch, "a")[0] == [5, 6, 31]


def test_append_one_each_equals_append_tokens():
    batches = [make_batch(), make_batch()]
    for batch in batches:
        batch.update(output([new("a", [5, 6]), new("b", [7]), new("full", range(MAX_MODEL_LEN))]))
        rows_np, one_each_np = batch.rows_of(["b", "a"]), np.ones(2, np.int32)
        batch.record_drawn(rows_np, one_each_np)
    batches[0].append_tokens(rows_np, np.array([[30, 31]], np.int32), one_each_np)
    batches[1].append_one_each(rows_np, np.array([30, 31], np.int32))
    for batch in batches:
        assert not batch.num_pending_np.any()
        assert row_contents(batch, "b")[0] == [7, 30]
        assert row_contents(batch, "a")[0] == [5, 6, 31]
    with pytest.raises(InvariantError, match="max_model_len=12"):
        batches[1].append_one_each(batches[1].rows_of(["full"]), np.array([1], np.int32))


@given(st.data())
def test_rows_are_equal_whether_tokens_are_written_late_or_at_once(data):
    """Two batches get the same steps of one token per row, fetched in order."""
    late, prompt = make_batch(), output([new(req_id, [5, 6], [1]) for req_id in "abc"])
    at_once = make_batch()
    late.update(prompt)
    at_once.update(prompt)
    one_each_np = np.ones(3, np.int32)
    unfetched, token_id = [], 10
    for _ in range(data.draw(st.integers(1, MAX_MODEL_LEN - 2))):
        order = data.draw(st.sampled_from(["abc", "abc", "abc", "cab"]))
        rows_np = late.rows_of(list(order))
        late.record_drawn(rows_np, one_each_np)
        at_once.record_drawn(rows_np.copy(), one_each_np)
        unfetched.append((rows_np, np.arange(token_id, token_id + 3, dtype=np.int32)))
        token_id += 3
        while unfetched and data.draw(st.booleans()):
            rows_np, token_ids_np = unfetched.pop(0)
            late.append_one_each(rows_np, token_ids_np)
            at_once.append_tokens(rows_np, token_ids_np[None], one_each_np)
        if data.draw(st.integers(0, 4)) == 0:
            np.testing.assert_array_equal(late.num_tokens_np, at_once.num_tokens_np)
    if data.draw(st.booleans()):
        for batch in (late, at_once):
            batch.update(output(preempted=["b"]))
    for name in ("token_ids_np", "num_tokens_np", "num_pending_np", "prev_sampled_idx_np"):
        np.testing.assert_array_equal(getattr(late, name), getattr(at_once, name), name)


def test_rows_of_returns_the_same_array_until_a_row_changes():
    batch = make_batch()
    batch.update(output([new("a"), new("b")]))
    rows_np = batch.rows_of(["b", "a"])
    batch.update(output(cached=[("b", None, 2), ("a", [8], 2)]))
    assert batch.rows_of(["b", "a"]) is rows_np
    assert batch.drain_grown_rows() == [rows_np[1]] and batch.drain_grown_rows() == []
    # Another request has the row.
    batch.update(output([new("a")], finished=["a"]))
    assert batch.rows_of(["b", "a"]) is not rows_np
    assert batch.rows_of(["b", "a"]).tolist() == rows_np.tolist()


def test_rows_that_need_more_than_tokens_are_counted_while_they_run():
    batch = make_batch()
    more = [new("a", logprobs=0), new("c", logprobs=3)]
    batch.update(output([*more, new("b"), new("d", prompt_logprobs=1)]))
    assert batch.num_needing_more == 2
    batch.update(output(preempted=["a"]))
    assert batch.num_needing_more == 1
    batch.update(output(cached=[("a", [8], 1)], resumed={"a": [5, 6, 7]}, finished=["c"]))
    assert batch.num_needing_more == 1


def test_resumed_request_keeps_its_ending_tokens():
    batch = make_batch()
    ending = tuple(range(50, 50 + MAX_ENDING_IDS + 1))  # one more than a burst looks for
    new_req = dataclasses.replace(new("a", [5, 6], min_tokens=0), ending_token_ids=ending)
    batch.update(output([new_req, new("b")]))
    row = batch.rows_of(["a"])[0]
    assert batch.ending_ids_np[row].tolist() == list(ending[:-1])
    assert batch.first_end_np[row] == 1  # its first drawn token has position 2
    assert (batch.ending_ids_np[batch.rows_of(["b"])[0]] == NO_TOKEN).all()
    batch.update(output(preempted=["a"]))
    batch.update(output(cached=[("a", [8], 1)], resumed={"a": [5, 6, 7]}))
    row = batch.rows_of(["a"])[0]
    assert batch.ending_ids_np[row].tolist() == list(ending[:-1])
    assert batch.first_end_np[row] == 1


def test_request_without_a_seed_draws_by_engine_seed_and_id():
    batch = make_batch()
    batch.update(output([new("a"), new("b"), new("c", seed=5), new("d", seed=5)]))
    seeds = batch.sampling_rows_np[:, SEED : SEED + 2]
    assert (seeds[0] != seeds[1]).any()
    np.testing.assert_array_equal(seeds[2], seeds[3])
    again = make_batch()
    again.update(output([new("x"), new("a")]))
    np.testing.assert_array_equal(again.sampling_rows_np[1, SEED : SEED + 2], seeds[0])


@given(data=st.data())
def test_rows_match_a_plain_dict_under_random_traffic(data):
    batch = make_batch()
    running: dict[str, tuple[list[int], int, list[int]]] = {}
    preempted: dict[str, list[int]] = {}
    for step in range(25):
        kinds = ["extend", "append", "finish", "preempt"] if running else []
        kinds += ["add", "resume"] if len(running) < MAX_NUM_SEQS else []
        kind = data.draw(st.sampled_from(kinds))
        some = data.draw(st.sampled_from(sorted(running))) if running else None
        block = data.draw(st.integers(1, NUM_BLOCKS - 1))
        if kind == "add":
            batch.update(output([new(f"r{step}", [step, 1], [block], 1)]))
            running[f"r{step}"] = ([step, 1], 1, [block])
        elif kind == "extend" and len(running[some][2]) < MAX_BLOCKS:
            batch.update(output(cached=[(some, [block], step)]))
            running[some] = (running[some][0], step, [*running[some][2], block])
        elif kind == "append" and len(running[some][0]) < MAX_MODEL_LEN:
            append(batch, some, step)
            running[some][0].append(step)
        elif kind == "finish":
            batch.update(output(finished=[some]))
            del running[some]
        elif kind == "preempt":
            batch.update(output(preempted=[some]))
            preempted[some] = running.pop(some)[0]
        elif kind == "resume" and preempted:
            req_id, tokens = preempted.popitem()
            batch.update(output(cached=[(req_id, [block], 0)], resumed={req_id: list(tokens)}))
            running[req_id] = (tokens, 0, [block])
        for req_id, contents in running.items():
            assert row_contents(batch, req_id) == contents
        rows = batch.rows_of(sorted(running)).tolist()
        assert len(set(rows)) == len(rows)
        assert set(batch.requests) == running.keys() | preempted.keys()
