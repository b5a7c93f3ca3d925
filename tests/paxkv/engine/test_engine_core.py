"""The engine core handles messages, runs steps, and ends only requests that fail."""

import dataclasses
import json
import random

import msgspec
import pytest

from paxkv.config.cache_config import CacheConfig
from paxkv.contracts.engine_output import (
    EngineCoreOutput,
    SchedulerStats,
    StepOutputs,
    UtilityReply,
)
from paxkv.contracts.engine_request import AbortRequests, AddRequest, Shutdown, UtilityCall
from paxkv.contracts.scheduler_output import SchedulerOutput
from paxkv.engine.engine_core import MAX_EMPTY_STEPS, EngineCore
from paxkv.engine.step_in_flight import StepInFlight
from paxkv.errors import InvariantError
from paxkv.scheduler.scheduler import Scheduler
from tests.paxkv.engine.fake_engine import (
    FakeClock,
    make_engine_core,
    make_request,
)
from tests.paxkv.no_cached import NO_CACHED


def run_until_idle(core: EngineCore) -> list[EngineCoreOutput]:
    outputs = []
    while core.has_work:
        outputs += core.step().outputs
    return outputs


def tokens_of(outputs: list[EngineCoreOutput], request_id: str) -> list[int]:
    return [t for o in outputs if o.request_id == request_id for t in o.new_token_ids]


# Synchronous steps; one step ahead; bursts; both.
MODES = [(1, 1), (2, 1), (1, 4), (2, 4)]
every_mode = pytest.mark.parametrize(("max_steps_in_flight", "max_decode_burst"), MODES)


@every_mode
def test_concurrent_requests_run_until_max_tokens(
    max_steps_in_flight: int, max_decode_burst: int
) -> None:
    core = make_engine_core(
        max_steps_in_flight=max_steps_in_flight, max_decode_burst=max_decode_burst
    )
    assert core.handle(AddRequest(request=make_request("a", [5, 6, 7], max_tokens=5))) is None
    assert core.handle(AddRequest(request=make_request("b", [8], max_tokens=2))) is None
    outputs = run_until_idle(core)
    assert tokens_of(outputs, "a") == [5, 6, 7, 5, 6]
    assert tokens_of(outputs, "b") == [8, 8]
    assert [o.finish_reason for o in outputs if o.finish_reason] == ["length", "length"]


@every_mode
def test_inspector_counts_as_many_steps_as_the_metrics(
    max_steps_in_flight: int, max_decode_burst: int
) -> None:
    core = make_engine_core(
        max_steps_in_flight=max_steps_in_flight, max_decode_burst=max_decode_burst
    )
    inspect = UtilityCall(call_id=1, method="inspect", arguments=(-1, True))
    core.handle(inspect)
    core.handle(AddRequest(request=make_request("a", [5, 6, 7], max_tokens=5)))
    run_until_idle(core)
    counters = json.loads(core.handle(inspect).result_json)["snapshot"]["counters"]
    # The last step only reports the request's end to the runner.
    assert counters["num_steps"] == core.make_stats().num_steps
    assert counters["num_output_tokens"] == 5


@every_mode
def test_random_traffic_gets_the_expected_tokens_in_every_mode(
    max_steps_in_flight: int, max_decode_burst: int
) -> None:
    """Arrivals and aborts between the steps, in a pool so small that requests are preempted."""
    core = make_engine_core(
        num_blocks=14,
        max_num_seqs=4,
        max_steps_in_flight=max_steps_in_flight,
        max_decode_burst=max_decode_burst,
    )
    draw, outputs, expected = random.Random(3), [], {}
    for i in range(30):
        prompt = [draw.randint(1, 50) for _ in range(draw.randint(1, 30))]
        prompt[draw.randrange(len(prompt))] = draw.choice([0, 7, 8, 9])  # 0 is EOS
        max_tokens = draw.randint(1, 40)
        core.handle(AddRequest(request=make_request(f"r{i}", prompt, max_tokens=max_tokens)))
        tokens = (prompt * 40)[:max_tokens]
        expected[f"r{i}"] = tokens[: tokens.index(0) + 1] if 0 in tokens else tokens
        for _ in range(draw.randint(0, 6)):
            outputs += core.step().outputs if core.has_work else []
            core._scheduler.check_invariants()
        if i % 7 == 3:
            core.handle(AbortRequests(request_ids=[f"r{i}"]))
            del expected[f"r{i}"]
    outputs += run_until_idle(core)
    assert {req_id: tokens_of(outputs, req_id) for req_id in expected} == expected
    stats = core.make_stats()
    assert stats.num_preemptions > 0
    assert (stats.kv_cache_usage, core._executor.num_in_flight) == (0.0, 0)
    assert core._executor.most_in_flight == max_steps_in_flight
    assert (max(core._executor.num_decode_steps) > 1) == (max_decode_burst > 1)
    assert core._executor.rows == {}


def test_next_step_starts_before_the_previous_step_is_fetched() -> None:
    core = make_engine_core(max_steps_in_flight=2)
    core.handle(AddRequest(request=make_request("a", [5, 6], max_tokens=3)))
    assert tokens_of(core.step().outputs, "a") == [5]
    assert (core._executor.num_steps, core._executor.num_in_flight) == (2, 1)
    core.handle(AbortRequests(request_ids=["a"]))
    assert core.has_work  # a step is still out
    assert core.step().outputs == []
    run_until_idle(core)
    assert core._executor.rows == {} and core._executor.num_in_flight == 0


def test_engine_has_spare_time_only_during_a_long_burst(
    clock: FakeClock,
) -> None:
    core = make_engine_core(max_steps_in_flight=2, max_decode_burst=4, device_step_s=0.02)
    assert core.spare_s == 0.0  # nothing runs
    core.handle(AddRequest(request=make_request("a", [5, 6], max_tokens=60)))
    for _ in range(10):
        core.step()
    assert core._executor.num_decode_steps[-1] == 4
    # The engine checks the device after the time of each of the four steps.
    assert core.spare_s == pytest.approx(0.02)
    clock.sleep(0.05)
    assert core.spare_s == pytest.approx(0.7 * 0.08 - 0.05)
    clock.sleep(0.006)
    assert core.spare_s == 0.0
    core.handle(AddRequest(request=make_request("b", [7, 8], max_tokens=60)))
    core.step()
    # The step computes a prompt, so its duration is unknown.
    assert core.spare_s == 0.0


def test_no_spare_time_with_one_step_in_flight_or_short_bursts(clock: FakeClock) -> None:
    for max_steps_in_flight, device_step_s in ((1, 0.02), (2, 0.0001)):
        core = make_engine_core(
            max_steps_in_flight=max_steps_in_flight,
            max_decode_burst=4,
            device_step_s=device_step_s,
        )
        core.handle(AddRequest(request=make_request("a", [5, 6], max_tokens=60)))
        for _ in range(5):
            core.step()
            assert core.spare_s == 0.0


def test_no_spare_time_if_decisions_take_long(clock: FakeClock) -> None:
    core = make_engine_core(max_steps_in_flight=2, step_s=0.02, device_step_s=0.03)
    core.handle(AddRequest(request=make_request("a", [5, 6], max_tokens=60)))
    for _ in range(8):
        core.step()
        # Otherwise the device would idle, its steps would seem longer, and waits would grow.
        assert core.spare_s == 0.0


def test_no_spare_time_after_the_device_has_finished(clock: FakeClock) -> None:
    core = make_engine_core(max_steps_in_flight=2, max_decode_burst=4, device_step_s=0.05)
    core.handle(AddRequest(request=make_request("a", [5, 6], max_tokens=60)))
    for _ in range(5):
        core.step()
    assert core.spare_s > 0.0
    core._in_flight[0].handle._done_at_s = 0.0
    assert core.spare_s == 0.0


def test_eos_ends_a_request() -> None:
    core = make_engine_core()
    core.handle(AddRequest(request=make_request("a", [5, 0, 7], max_tokens=9)))
    outputs = run_until_idle(core)
    assert tokens_of(outputs, "a") == [5, 0]
    assert outputs[-1].finish_reason == "stop"


def test_abort_frees_blocks_and_the_row_in_the_executor() -> None:
    core = make_engine_core()
    core.handle(AddRequest(request=make_request("a", [5], max_tokens=100)))
    core.handle(AddRequest(request=make_request("b", [6], max_tokens=3)))
    core.step()
    core.handle(AbortRequests(request_ids=["a", "unknown"]))
    outputs = run_until_idle(core)
    assert {o.request_id for o in outputs} == {"b"}
    stats = core.make_stats()
    assert (stats.num_running_reqs, stats.num_waiting_reqs, stats.kv_cache_usage) == (0, 0, 0.0)
    assert core._executor.rows == {}


@pytest.mark.parametrize(
    "request_",
    [
        make_request("a", [5]),
        make_request("big", [5], max_tokens=250),
        make_request("long", [5] * 300),
    ],
    ids=["duplicate", "never_fits", "too_long"],
)
def test_refused_request_does_not_end_other_requests(request_: object) -> None:
    core = make_engine_core(num_blocks=4)
    core.handle(AddRequest(request=make_request("a", [5], max_tokens=3)))
    reply = core.handle(AddRequest(request=request_))
    assert isinstance(reply, StepOutputs)
    assert [(o.request_id, o.finish_reason) for o in reply.outputs] == [
        (request_.request_id, "error")
    ]
    assert tokens_of(run_until_idle(core), "a") == [5, 5, 5]


def test_utility_calls_are_answered_by_id() -> None:
    core = make_engine_core()
    reply = core.handle(UtilityCall(call_id=3, method="reset_prefix_cache"))
    assert reply == UtilityReply(call_id=3, result_json="true")
    core.handle(AddRequest(request=make_request("a", [5] * 20)))
    core.step()
    reply = core.handle(UtilityCall(call_id=4, method="reset_prefix_cache"))
    assert reply == UtilityReply(call_id=4, result_json="false")
    reply = core.handle(UtilityCall(call_id=5, method="check_invariants"))
    assert reply == UtilityReply(call_id=5, result_json="null")
    stats = json.loads(core.handle(UtilityCall(call_id=6, method="get_stats")).result_json)
    assert (stats["num_running_reqs"], stats["num_padded_tokens"]) == (1, 7)
    assert stats["num_corrupted_reqs"] == 3


def test_steps_carry_only_new_statistics_of_features_and_answers_carry_all() -> None:
    core = make_engine_core()
    core._executor.stats_of_features = {"expert_tokens": {2: (5, 0)}}
    core.handle(AddRequest(request=make_request("a", [5] * 20)))
    assert core.step().stats.expert_tokens == {}
    reply = core.handle(UtilityCall(call_id=6, method="get_stats"))
    stats = msgspec.json.decode(reply.result_json, type=SchedulerStats)
    assert stats.expert_tokens == {2: (5, 0)}


def test_unknown_utility_is_an_error_reply() -> None:
    reply = make_engine_core().handle(UtilityCall(call_id=1, method="__init__"))
    assert reply.result_json is None
    assert "__init__" in reply.error


def test_failed_invariant_check_is_reported_and_engine_continues() -> None:
    class BrokenScheduler:
        def check_invariants(self) -> None:
            raise InvariantError("a block is lost")

        reset_prefix_cache = explain_prefix_cache_miss = check_invariants

    reply = EngineCore(BrokenScheduler(), None).handle(
        UtilityCall(call_id=1, method="check_invariants")
    )
    assert "a block is lost" in reply.error


def test_shutdown_waits_for_requests_only_when_draining() -> None:
    core = make_engine_core()
    core.handle(AddRequest(request=make_request("a", [5], max_tokens=2)))
    assert not core.is_finished
    core.handle(Shutdown(drain=True))
    assert not core.is_finished
    refused = core.handle(AddRequest(request=make_request("late", [5])))
    assert refused.outputs[0].finish_reason == "error"
    assert tokens_of(run_until_idle(core), "a") == [5, 5]
    assert core.is_finished

    core = make_engine_core()
    core.handle(AddRequest(request=make_request("a", [5], max_tokens=2)))
    core.handle(Shutdown(drain=True))
    core.handle(Shutdown())
    assert core.is_finished


NOTHING = SchedulerOutput(
    scheduled_new_reqs=[],
    scheduled_cached_reqs=NO_CACHED,
    num_scheduled_tokens={},
    total_num_scheduled_tokens=0,
    preempted_req_ids=frozenset(),
    finished_req_ids=frozenset(),
)


def test_error_after_many_steps_without_a_scheduled_token() -> None:
    core = make_engine_core()
    core.handle(AddRequest(request=make_request("a", [5])))
    core._scheduler.schedule = lambda max_decode_steps: NOTHING
    for _ in range(MAX_EMPTY_STEPS):
        core.step()
    with pytest.raises(InvariantError, match="1 requests wait"):
        core.step()


def test_empty_steps_count_from_the_end_of_the_last_computing_step() -> None:
    core = make_engine_core(max_steps_in_flight=2)
    core.handle(AddRequest(request=make_request("a", [5], max_tokens=9)))
    core.step()
    core._scheduler.schedule = lambda max_decode_steps: NOTHING
    # The first of these steps fetches the step that computes.
    for _ in range(1 + MAX_EMPTY_STEPS):
        core.step()
    with pytest.raises(InvariantError, match="1 requests wait"):
        core.step()


def test_utility_calls_pass_arguments_and_reject_wrong_ones() -> None:
    core = make_engine_core()
    core.handle(AddRequest(request=make_request("a", [5] * 20)))
    core.step()
    reply = core.handle(UtilityCall(call_id=1, method="reset_prefix_cache", arguments=(True,)))
    assert reply == UtilityReply(call_id=1, result_json="true")
    assert tokens_of(run_until_idle(core), "a") == [5] * 3
    call = UtilityCall(call_id=2, method="explain_prefix_cache_miss", arguments=("a",))
    assert json.loads(core.handle(call).result_json)["num_tokens"] == 20
    for arguments in ((), ("a", "b")):
        call = UtilityCall(call_id=3, method="explain_prefix_cache_miss", arguments=arguments)
        reply = core.handle(call)
        assert (reply.call_id, reply.result_json) == (3, None)
        assert "explain_prefix_cache_miss got" in reply.error


def test_requests_may_wait_long_for_another_component() -> None:
    class Grammars:
        is_open = False

        def is_ready(self, request_id: str) -> bool:
            return self.is_open

    core = make_engine_core()
    gate = Grammars()
    scheduler = core._scheduler
    core._scheduler = Scheduler(
        scheduler_config=scheduler.scheduler_config,
        cache_config=CacheConfig(block_size=8),
        kv_cache_config=core._executor.kv_cache_config,
        max_model_len=64,
        grammar_gate=gate,
    )
    request = dataclasses.replace(make_request("a", [5], max_tokens=2), needs_grammar=True)
    core.handle(AddRequest(request=request))
    for _ in range(3 * MAX_EMPTY_STEPS):
        assert core.step().outputs == []
    gate.is_open = True
    assert tokens_of(run_until_idle(core), "a") == [5, 5]


def test_used_slots_are_counted_every_few_steps_and_on_request() -> None:
    core = make_engine_core()
    core.handle(AddRequest(request=make_request("a", [5], max_tokens=40)))
    used = [core.step().stats.num_used_slots for _ in range(33)]
    assert used == [0] * 15 + [16] * 16 + [32] * 2
    assert core.make_stats().num_used_slots == 33
    run_until_idle(core)
    core.handle(AddRequest(request=make_request("b", [5], max_tokens=1)))
    assert core.step().stats.num_used_slots == 0


def test_profile_is_recorded_by_the_executor() -> None:
    core = make_engine_core()

    def call(method: str, *arguments: str) -> str | None:
        message = UtilityCall(call_id=1, method=method, arguments=arguments)
        return core.handle(message).result_json

    assert call("stop_profile") == "false"
    assert call("start_profile", "folder") == "true"
    assert call("start_profile", "other") == "false"
    assert call("stop_profile") == "true"


def test_only_steps_in_which_every_request_decodes_are_measured() -> None:
    core = make_engine_core()
    outputs = [core._scheduler.schedule()]
    for prompt in ([5, 6], [7]):
        core.handle(AddRequest(request=make_request(f"r{len(prompt)}", prompt)))
        outputs.append(core._scheduler.schedule())
        core.handle(AbortRequests(request_ids=[f"r{len(prompt)}"]))
    steps = [StepInFlight(scheduler_output=output, handle=None, start_s=0.0) for output in outputs]
    assert [step.num_scheduled_tokens for step in steps] == [0, 2, 1]
    assert [step.is_burst for step in steps] == [False, False, True]
