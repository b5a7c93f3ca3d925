"""A recorder returns its scheduler's results, and reports every call that changes its state."""

from pathlib import Path

import pytest

from paxkv.entrypoints.build_scheduler import make_scheduler, record_scheduler
from paxkv.errors import InvalidRequestError, InvariantError
from paxkv.kv_cache.observers.block_movements import BlockMovements
from paxkv.trace.calls import (
    AddRequestCall,
    Call,
    ControlCall,
    FinishRequestsCall,
    NewRow,
    OutputRow,
    SampledRow,
    ScheduleCall,
    UpdateCall,
)
from paxkv.trace.recorder import TraceRecorder, make_recorder
from paxkv.trace.trace_file import TraceReader
from tests.paxkv.trace.small_traces import (
    TOKEN,
    answer,
    make_header,
    make_request,
    record_run,
    run_to_end,
)


@pytest.fixture
def calls() -> list[Call]:
    return []


@pytest.fixture
def recorder(calls: list[Call]) -> TraceRecorder:
    return make_recorder(make_header(), make_scheduler, calls.append)


def run_step(recorder: TraceRecorder) -> list:
    output = recorder.schedule()
    return recorder.update_from_output(output, answer(recorder, output))


def test_calls_of_one_request_are_reported(recorder: TraceRecorder, calls: list[Call]) -> None:
    # 9 tokens fill a block of 8 and begin another; the first of 2 new tokens ends nothing.
    recorder.add_request(make_request("r", 9, max_tokens=2))
    run_step(recorder)
    outputs = run_step(recorder)
    assert [(o.new_token_ids, o.finish_reason) for o in outputs] == [([TOKEN], "length")]
    add, first, first_update, second, second_update = calls
    assert isinstance(add, AddRequestCall) and add.engine_request() == make_request("r", 9)
    assert isinstance(first, ScheduleCall) and first.step == 1
    assert first.decision.new == [NewRow("r", 9, 0, [[1, 2]])]
    assert first.moved == BlockMovements(allocated=[1, 2], cached=[1])
    # 8 blocks without the null block.
    counts = (first.num_running_reqs, first.num_waiting_reqs, first.num_free_blocks)
    assert counts == (1, 0, 6)
    assert first_update.sampled == [SampledRow("r", [TOKEN])] and first_update.moved is None
    assert second.decision.running[0].num_computed_tokens == 9 and second.moved is None
    assert second_update.outputs == [OutputRow("r", [TOKEN], "length", None, 0)]
    # In reverse.
    assert second_update.moved == BlockMovements(freed=[2, 1])


def test_bursts_are_reported_with_max_decode_steps(
    recorder: TraceRecorder, calls: list[Call]
) -> None:
    recorder.add_request(make_request("r", 9, max_tokens=5))
    run_step(recorder)
    output = recorder.schedule(8)
    assert output.num_decode_steps == 4
    recorder.update_from_output(output, answer(recorder, output))
    decided, updated = calls[-2:]
    assert (decided.max_decode_steps, decided.decision.num_decode_steps) == (8, 4)
    assert decided.decision.running[0].num_scheduled_tokens == 4
    assert updated.outputs == [OutputRow("r", [TOKEN] * 4, "length", None, 0)]
    single = calls[1]
    assert (single.max_decode_steps, single.decision.num_decode_steps) == (1, 1)


def test_prefix_hits_and_evictions_are_reported(recorder: TraceRecorder, calls: list[Call]) -> None:
    recorder.add_request(make_request("a", 9, max_tokens=1))
    run_step(recorder)
    recorder.add_request(make_request("b", 9, max_tokens=1))
    run_step(recorder)
    assert calls[4].decision.new == [NewRow("b", 1, 8, [[1, 3]])]
    assert calls[4].moved == BlockMovements(allocated=[3], shared=[1])
    assert recorder.reset_prefix_cache() is True
    assert calls[-1].method == "reset_prefix_cache" and calls[-1].result is True
    assert calls[-1].moved == BlockMovements(evicted=[1])


def test_finish_requests_is_reported_also_for_a_generator(
    recorder: TraceRecorder, calls: list[Call]
) -> None:
    recorder.add_request(make_request("a"))
    recorder.finish_requests((name for name in ("a", "unknown")), "stop")
    assert isinstance(calls[-1], FinishRequestsCall)
    assert (calls[-1].request_ids, calls[-1].finish_reason) == (["a", "unknown"], "stop")
    assert not recorder.has_unfinished_requests()
    recorder.finish_requests(["a"])
    assert calls[-1].finish_reason == "abort"


def test_failed_cache_reset_is_reported_as_false(
    recorder: TraceRecorder, calls: list[Call]
) -> None:
    recorder.add_request(make_request("a"))
    run_step(recorder)
    assert recorder.reset_prefix_cache() is False
    assert isinstance(calls[-1], ControlCall) and calls[-1].result is False


def test_rejected_request_is_reported_and_raises(
    recorder: TraceRecorder, calls: list[Call]
) -> None:
    with pytest.raises(InvalidRequestError, match="no tokens"):
        recorder.add_request(make_request("r", 0))
    assert calls[0].error.startswith("InvalidRequestError: the prompt has no tokens")


def test_failed_update_is_reported_and_raises(recorder: TraceRecorder, calls: list[Call]) -> None:
    recorder.add_request(make_request("r", 20))
    output = recorder.schedule()  # 16 of its 20 tokens
    early = answer(recorder, output)
    early.sampled_token_ids[0].append(TOKEN)
    with pytest.raises(InvariantError):
        recorder.update_from_output(output, early)
    assert isinstance(calls[-1], UpdateCall) and calls[-1].error.startswith("InvariantError: ")


def test_update_for_a_step_that_is_not_in_flight_is_an_error(recorder: TraceRecorder) -> None:
    output = recorder.schedule()
    recorder.update_from_output(output, answer(recorder, output))
    with pytest.raises(InvariantError, match="not in flight"):
        recorder.update_from_output(output, answer(recorder, output))


def test_methods_that_change_nothing_are_forwarded(
    recorder: TraceRecorder, calls: list[Call]
) -> None:
    recorder.check_invariants()
    assert recorder.make_stats().num_blocks == 9
    assert recorder.limits.max_model_len == 64
    with pytest.raises(AttributeError):
        recorder.no_such_method()
    assert calls == []


def test_recording_changes_no_decision(tmp_path: Path) -> None:
    """With too many requests for the pool, recorded and plain runs choose the same blocks."""
    requests = [make_request(f"r{i}", 14, max_tokens=20, first_token=i % 3) for i in range(8)]
    decisions = []
    for is_recorded in (False, True):
        scheduler = make_scheduler(make_header())
        if is_recorded:
            scheduler = record_scheduler(make_header(), tmp_path / "t")
        for request in requests:
            scheduler.add_request(request)
        outputs = []
        while scheduler.has_unfinished_requests():
            outputs.append(scheduler.schedule())
            scheduler.update_from_output(outputs[-1], answer(scheduler, outputs[-1]))
        assert scheduler.num_preemptions > 0
        decisions.append(outputs)
    assert decisions[0] == decisions[1]


def test_recorded_scheduler_uses_the_seed_in_the_header(tmp_path: Path) -> None:
    header = make_header()
    object.__setattr__(header.cache_config, "prefix_caching_seed", None)
    record_run(tmp_path / "t", make_request("r", 9), header=header)
    seed = TraceReader.open(tmp_path / "t").header.cache_config.prefix_caching_seed
    assert seed is not None and len(seed) == 64


def test_trace_has_one_line_per_step(tmp_path: Path) -> None:
    scheduler = record_scheduler(make_header(), tmp_path / "t")
    scheduler.add_request(make_request("r", 4, max_tokens=3))
    run_to_end(scheduler)
    lines = list(TraceReader.open(tmp_path / "t").lines())
    # 3 tokens, and the step that reports the request's end to the runner.
    assert [line.calls[-1].step for line in lines] == [1, 2, 3, 4]
