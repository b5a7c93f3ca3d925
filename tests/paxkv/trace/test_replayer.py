"""A trace replays exactly, and the replay reports every change of it."""

import dataclasses
import random
from collections import deque
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.scheduler_output import SchedulerOutput
from paxkv.entrypoints.build_scheduler import make_scheduler, record_scheduler
from paxkv.errors import InvalidRequestError, InvariantError, TraceFileError
from paxkv.trace.calls import (
    AddRequestCall,
    Call,
    FinishRequestsCall,
    NewRow,
    OutputRow,
    SampledRow,
    ScheduleCall,
    UpdateCall,
)
from paxkv.trace.replayer import ReplaySummary, replay
from paxkv.trace.trace_file import TraceReader, TraceWriter
from tests.paxkv.scheduler.stepping import FunctionRunner
from tests.paxkv.trace.small_traces import (
    answer,
    make_header,
    make_request,
    record_run,
    run_to_end,
)


def replay_file(file: Path) -> ReplaySummary:
    return replay(TraceReader.open(file), make_scheduler)


def rewrite(file: Path, change) -> None:
    """Replaces every call of a trace by the result of `change`."""
    reader = TraceReader.open(file)
    calls = [change(call) for line in reader.lines() for call in line.calls]
    writer = TraceWriter(file, reader.header)
    for call in calls:
        writer.write(call)
    writer.close()


def test_recorded_run_replays_exactly_with_the_right_totals(tmp_path: Path) -> None:
    # The second prompt hits the first block of the first, which is 8 tokens.
    record_run(tmp_path / "t", make_request("a", 9), make_request("b", 10))
    summary = replay_file(tmp_path / "t")
    assert dataclasses.asdict(summary) == {
        "num_steps": 3,  # prefill and first tokens, second tokens, ends
        "num_requests": 2,
        "num_preemptions": 0,
        "num_scheduled_tokens": 9 + 2 + 1 + 1,
        "num_hit_tokens": 8,
        "num_output_tokens": 4,
        "num_draft_tokens": 0,
        "num_accepted_tokens": 0,
        "failure": None,
        "difference": None,
        "difference_at": "",
    }


def test_preemptions_aborts_resets_and_rejections_replay_exactly(tmp_path: Path) -> None:
    scheduler = record_scheduler(make_header(policy="priority"), tmp_path / "t")
    rng = random.Random(0)
    for i in range(60):
        request = make_request(f"r{i}", rng.randint(0, 30), max_tokens=rng.randint(1, 20))
        try:
            scheduler.add_request(dataclasses.replace(request, priority=rng.randint(0, 2)))
        except InvalidRequestError:
            assert not request.prompt_token_ids
        output = scheduler.schedule()
        # While the step runs.
        scheduler.finish_requests([f"r{rng.randint(0, i)}"] if i % 7 == 0 else [])
        scheduler.update_from_output(output, answer(scheduler, output))
        if i % 20 == 0:
            scheduler.reset_prefix_cache()
    summary = replay_file(tmp_path / "t")
    assert summary.num_preemptions > 0 and summary.num_hit_tokens > 0
    assert summary.difference is None


def test_overlapping_steps_replay_exactly(tmp_path: Path) -> None:
    """The second step is decided before the first step's tokens arrive."""
    scheduler = record_scheduler(make_header(), tmp_path / "t")
    scheduler.add_request(make_request("a", 40))
    first, second = scheduler.schedule(), scheduler.schedule()
    nothing = answer(scheduler, first)
    assert nothing.sampled_token_ids == [[]]
    scheduler.update_from_output(first, nothing)
    third = scheduler.schedule()
    scheduler.update_from_output(second, nothing)
    scheduler.update_from_output(third, answer(scheduler, third))
    lines = list(TraceReader.open(tmp_path / "t").lines())
    assert [line.calls[-1].step for line in lines] == [1, 2, 3]
    summary = replay_file(tmp_path / "t")
    assert (summary.num_steps, summary.difference) == (3, None)


def test_pooled_requests_replay_exactly(tmp_path: Path) -> None:
    scheduler = record_scheduler(make_header(), tmp_path / "t")
    scheduler.add_request(dataclasses.replace(make_request("pooled", 9), is_pooled=True))
    output = scheduler.schedule()
    pooled = dataclasses.replace(
        answer(scheduler, output), sampled_token_ids=[[]], pooler_output={"pooled": [0.5]}
    )
    assert scheduler.update_from_output(output, pooled)[0].finish_reason == "stop"
    # The next request hits the block that the pooled request has freed.
    scheduler.add_request(make_request("b", 10))
    run_to_end(scheduler)
    summary = replay_file(tmp_path / "t")
    assert (summary.num_hit_tokens, summary.difference) == (8, None)


def record_bursts(file: Path, seed: int, *, is_async: bool) -> list[SchedulerOutput]:
    """Requests arrive and are aborted during bursts; two steps are in flight if `is_async`."""
    header = dataclasses.replace(make_header(num_blocks=30), is_async=is_async)
    scheduler, runner, rng = record_scheduler(header, file), FunctionRunner(), random.Random(seed)
    in_flight: deque = deque()
    outputs: list[SchedulerOutput] = []

    def fetch_oldest_step() -> None:
        scheduler.update_from_output(*in_flight.popleft())

    for i in range(40):
        if i % 7 == 0:
            request = make_request(f"r{i}", rng.randint(1, 16), max_tokens=rng.randint(5, 40))
            params = SamplingParams(max_tokens=40, stop_token_ids=[rng.randrange(97)])
            scheduler.add_request(dataclasses.replace(request, sampling_params=params))
        outputs.append(scheduler.schedule(rng.choice([1, 2, 4, 8])))
        in_flight.append((outputs[-1], runner.execute(outputs[-1])))
        if i % 11 == 0:
            scheduler.finish_requests([f"r{rng.randint(0, i)}"])
        if i % 13 == 0:
            scheduler.reset_prefix_cache(True)
        while len(in_flight) > is_async:
            fetch_oldest_step()
    while in_flight:
        fetch_oldest_step()
    return outputs


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_bursts_replay_exactly_also_if_they_overlap(
    tmp_path: Path, seed: int, is_async: bool
) -> None:
    outputs = record_bursts(tmp_path / "t", seed, is_async=is_async)
    assert sum(output.num_decode_steps > 1 for output in outputs) > 10
    summary = replay_file(tmp_path / "t")
    assert (summary.num_steps, summary.failure, summary.difference) == (40, None, None)
    assert summary.num_scheduled_tokens == sum(o.total_num_scheduled_tokens for o in outputs)
    # Each line ends with the update of its step, also if another step was decided before it.
    lines = list(TraceReader.open(tmp_path / "t").lines())
    assert [line.calls[-1].step for line in lines] == list(range(1, 41))


def test_other_max_decode_steps_change_the_replay(tmp_path: Path) -> None:
    outputs = record_bursts(tmp_path / "t", 0, is_async=True)
    first = next(i for i, output in enumerate(outputs, 1) if output.num_decode_steps > 1)

    def change(call: Call) -> Call:
        if isinstance(call, ScheduleCall) and call.step == first:
            return msgspec.structs.replace(call, max_decode_steps=1)
        return call

    rewrite(tmp_path / "t", change)
    summary = replay_file(tmp_path / "t")
    assert summary.difference_at == f"step {first}, schedule"
    assert (summary.difference.path, summary.difference.got) == ("decision.num_decode_steps", 1)


def changed_block(call: Call) -> Call:
    if isinstance(call, ScheduleCall) and call.decision.new:
        (row,) = call.decision.new
        other = NewRow(row.req_id, row.num_scheduled_tokens, row.num_computed_tokens, [[1, 5]])
        decision = msgspec.structs.replace(call.decision, new=[other])
        return msgspec.structs.replace(call, decision=decision)
    return call


def changed_movement(call: Call) -> Call:
    if isinstance(call, UpdateCall) and call.moved is not None:
        freed = call.moved.freed[::-1]
        return msgspec.structs.replace(call, moved=msgspec.structs.replace(call.moved, freed=freed))
    return call


def changed_output(call: Call) -> Call:
    if isinstance(call, UpdateCall) and call.step == 2:
        (row,) = call.outputs
        return msgspec.structs.replace(call, outputs=[OutputRow(row.req_id, [8], None, None, 0)])
    return call


def changed_count(call: Call) -> Call:
    if isinstance(call, ScheduleCall) and call.step == 3:
        return msgspec.structs.replace(call, num_free_blocks=7)
    return call


def changed_error(call: Call) -> Call:
    return (
        msgspec.structs.replace(call, error="KeyError: 1") if isinstance(call, UpdateCall) else call
    )


@pytest.mark.parametrize(
    ("change", "at", "path", "got", "recorded"),
    [
        (changed_block, "step 1, schedule", "decision.new['r'].block_ids[0][1]", 2, 5),
        (changed_movement, "step 2, update", "moved.freed[0]", 2, 1),
        (changed_output, "step 2, update", "outputs['r'].new_token_ids[0]", 7, 8),
        (changed_count, "step 3, schedule", "num_free_blocks", 8, 7),
        (changed_error, "step 1, update", "error", None, "KeyError: 1"),
    ],
)
def test_first_difference_is_reported_with_its_path(
    tmp_path: Path, change, at: str, path: str, got: object, recorded: object
) -> None:
    record_run(tmp_path / "t", make_request("r", 9))
    rewrite(tmp_path / "t", change)
    summary = replay_file(tmp_path / "t")
    assert summary.difference_at == at
    found = summary.difference
    assert (found.path, found.got, found.recorded) == (path, got, recorded)


def test_changed_token_is_reported_where_it_first_matters(tmp_path: Path) -> None:
    record_run(tmp_path / "t", make_request("r", 9, max_tokens=3))

    def change(call: Call) -> Call:
        if isinstance(call, UpdateCall) and call.step == 2:
            return msgspec.structs.replace(call, sampled=[SampledRow("r", [50])])
        return call

    rewrite(tmp_path / "t", change)
    summary = replay_file(tmp_path / "t")
    assert (summary.difference_at, summary.difference.got) == ("step 2, update", 50)


@pytest.mark.parametrize("recorded", ["InvalidRequestError: other words", "ConfigError: no"])
def test_errors_of_the_same_type_with_other_texts_are_equal(tmp_path: Path, recorded: str) -> None:
    scheduler = record_scheduler(make_header(), tmp_path / "t")
    with pytest.raises(InvalidRequestError):
        scheduler.add_request(make_request("r", 0))
    scheduler.close()

    def change(call: Call) -> Call:
        return call if call.error is None else msgspec.structs.replace(call, error=recorded)

    rewrite(tmp_path / "t", change)
    difference = replay_file(tmp_path / "t").difference
    assert (difference is None) == recorded.startswith("InvalidRequestError")


def test_failure_of_the_scheduler_is_replayed(tmp_path: Path) -> None:
    scheduler = record_scheduler(make_header(), tmp_path / "t")
    scheduler.add_request(make_request("r", 20))
    output = scheduler.schedule()
    early = answer(scheduler, output)
    early.sampled_token_ids[0].append(1)
    with pytest.raises(InvariantError):
        scheduler.update_from_output(output, early)
    summary = replay_file(tmp_path / "t")
    assert summary.difference is None and summary.failure.startswith("InvariantError: ")


def write_calls(file: Path, *calls: Call) -> None:
    writer = TraceWriter(file, make_header())
    for call in calls:
        writer.write(call)
    writer.close()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (UpdateCall(step=4), "step 4, which never began"),
        (AddRequestCall(request=msgspec.Raw(b"{}")), "a recorded request cannot be read"),
        (
            AddRequestCall(
                request=msgspec.Raw(
                    b'{"request_id":"r","prompt_token_ids":[1],"sampling_params":{"top_p":5}}'
                )
            ),
            "top_p",
        ),
        (AddRequestCall(request=msgspec.Raw(b'{"request_id":"\xff"}')), "cannot be read"),
    ],
)
def test_call_that_cannot_be_repeated_is_an_error(tmp_path: Path, call: Call, message: str) -> None:
    write_calls(tmp_path / "t", call)
    with pytest.raises(TraceFileError, match=message):
        replay_file(tmp_path / "t")


@pytest.mark.parametrize(
    "change", [{"num_blocks": 1}, {"groups": []}, {"hash_block_size": 3}, {"hash_block_size": 0}]
)
def test_header_that_builds_no_scheduler_is_an_error(tmp_path: Path, change: dict) -> None:
    write_calls(tmp_path / "t")
    header = msgspec.json.decode((tmp_path / "t").read_bytes())
    header["kv_cache_config"] |= change
    (tmp_path / "t").write_bytes(msgspec.json.encode(header) + b"\n")
    with pytest.raises(TraceFileError, match="line 1, the header"):
        replay_file(tmp_path / "t")


def test_unknown_control_call_is_an_error(tmp_path: Path) -> None:
    line = b'{"calls":[{"call":"control","method":"__del__"}]}\n'
    write_calls(tmp_path / "t", FinishRequestsCall(request_ids=[], finish_reason="abort"))
    with (tmp_path / "t").open("ab") as out:
        out.write(line)
    with pytest.raises(TraceFileError, match="line 3: not a step"):
        replay_file(tmp_path / "t")


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), num_blocks=st.integers(6, 20), is_fcfs=st.booleans())
def test_random_runs_replay_exactly(tmp_path_factory, seed, num_blocks, is_fcfs) -> None:
    file = tmp_path_factory.mktemp("trace") / "t"
    policy = "fcfs" if is_fcfs else "priority"
    header = make_header(num_blocks=num_blocks, policy=policy, enable_chunked_prefill=seed % 2 == 0)
    scheduler = record_scheduler(header, file)
    rng = random.Random(seed)
    for i in range(20):
        request = make_request(
            f"r{i}",
            rng.randint(1, 16),
            max_tokens=rng.randint(1, 12),
            first_token=rng.randint(0, 1),
        )
        scheduler.add_request(dataclasses.replace(request, priority=rng.randint(0, 2)))
        output = scheduler.schedule()
        if rng.random() < 0.2:
            scheduler.finish_requests([f"r{rng.randint(0, i)}"])
        scheduler.update_from_output(output, answer(scheduler, output))
    summary = replay_file(file)
    assert (summary.num_requests, summary.difference) == (20, None)
