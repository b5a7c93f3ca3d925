"""The engine core obeys messages, steps, and keeps one request's trouble from the others."""

import dataclasses
import json
import random

import pytest

from paxkv.config import CacheConfig, SchedulerConfig
from paxkv.contracts.engine_output import EngineCoreOutput, StepOutputs, UtilityReply
from paxkv.contracts.engine_request import AbortRequests, AddRequest, Shutdown, UtilityCall
from paxkv.contracts.grammar_bitmask import GrammarBitmask
from paxkv.contracts.kv_cache_spec import KVCacheConfig
from paxkv.contracts.runner_output import ModelRunnerOutput
from paxkv.contracts.scheduler_output import CachedRequestData, SchedulerOutput
from paxkv.engine.engine_core import MAX_EMPTY_STEPS, EngineCore
from paxkv.errors import InvariantError
from paxkv.scheduler.async_scheduler import AsyncScheduler
from paxkv.scheduler.scheduler import Scheduler
from paxkv.structured_output.grammar_manager import GrammarManager
from paxkv.structured_outputs_params import StructuredOutputsParams
from tests.paxkv.engine.fake_engine import (
    FakeExecutor,
    FakeStep,
    make_engine_core,
    make_request,
)
from tests.paxkv.structured_output.demo_grammars import (
    EOS,
    TOKENIZER,
    allowed_ids,
    make_compiler,
)


def run_until_idle(core: EngineCore) -> list[EngineCoreOutput]:
    outputs = []
    while core.has_work:
        outputs += core.step().outputs
    return outputs


def tokens_of(outputs: list[EngineCoreOutput], request_id: str) -> list[int]:
    return [t for o in outputs if o.request_id == request_id for t in o.new_token_ids]


# One step after the other; one ahead; bursts; both.
MODES = [(1, 1), (2, 1), (1, 4), (2, 4)]
every_mode = pytest.mark.parametrize(("max_steps_in_flight", "max_decode_burst"), MODES)


@every_mode
def test_requests_run_to_their_ends_together(
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
def test_traffic_gets_the_same_tokens_in_every_mode(
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


def test_step_is_started_before_the_one_before_it_is_fetched() -> None:
    core = make_engine_core(max_steps_in_flight=2)
    core.handle(AddRequest(request=make_request("a", [5, 6], max_tokens=3)))
    assert tokens_of(core.step().outputs, "a") == [5]
    assert (core._executor.num_steps, core._executor.num_in_flight) == (2, 1)
    core.handle(AbortRequests(request_ids=["a"]))
    assert core.has_work  # a step is still out
    assert core.step().outputs == []
    run_until_idle(core)
    assert core._executor.rows == {} and core._executor.num_in_flight == 0


def test_eos_ends_a_request() -> None:
    core = make_engine_core()
    core.handle(AddRequest(request=make_request("a", [5, 0, 7], max_tokens=9)))
    outputs = run_until_idle(core)
    assert tokens_of(outputs, "a") == [5, 0]
    assert outputs[-1].finish_reason == "stop"


def test_abort_midway_frees_everything_and_is_told_to_the_executor() -> None:
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
def test_request_that_cannot_be_taken_ends_alone(request_: object) -> None:
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


def test_unknown_utility_is_an_error_reply() -> None:
    reply = make_engine_core().handle(UtilityCall(call_id=1, method="__init__"))
    assert reply.result_json is None
    assert "__init__" in reply.error


def test_broken_invariant_is_reported_and_not_fatal() -> None:
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
    scheduled_cached_reqs=CachedRequestData(
        req_ids=[],
        resumed_req_ids=frozenset(),
        new_block_ids=[],
        num_computed_tokens=[],
        num_output_tokens=[],
        all_token_ids={},
    ),
    num_scheduled_tokens={},
    total_num_scheduled_tokens=0,
    preempted_req_ids=frozenset(),
    finished_req_ids=frozenset(),
)


def test_scheduler_that_schedules_nothing_for_ever_is_a_bug_that_is_seen() -> None:
    core = make_engine_core()
    core.handle(AddRequest(request=make_request("a", [5])))
    core._scheduler.schedule = lambda max_decode_steps: NOTHING
    for _ in range(MAX_EMPTY_STEPS):
        core.step()
    with pytest.raises(InvariantError, match="1 requests wait"):
        core.step()


def test_so_it_is_when_the_first_empty_step_was_decided_behind_one_that_computes() -> None:
    core = make_engine_core(max_steps_in_flight=2)
    core.handle(AddRequest(request=make_request("a", [5], max_tokens=9)))
    core.step()
    core._scheduler.schedule = lambda max_decode_steps: NOTHING
    # In the first of them the step that computes comes home.
    for _ in range(1 + MAX_EMPTY_STEPS):
        core.step()
    with pytest.raises(InvariantError, match="1 requests wait"):
        core.step()


def test_utility_calls_pass_their_arguments_and_wrong_ones_are_an_error_reply() -> None:
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


def test_requests_that_wait_for_something_outside_may_wait_long() -> None:
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


def test_used_slots_are_counted_now_and_then_and_when_asked() -> None:
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


class GrammarStep:
    """A step in which those bound by a grammar draw the first token that it allows."""

    def __init__(self, step: FakeStep, bound: set[str], *, is_lawless: bool) -> None:
        self._step = step
        self._bound = bound
        self._is_lawless = is_lawless
        self._drawn: dict[str, int] = {}
        self.needs_bitmask = bool(bound)

    def start_sampling(self, grammar_bitmask: GrammarBitmask) -> None:
        assert set(grammar_bitmask.req_ids) == self._bound
        for row, req_id in enumerate(grammar_bitmask.req_ids):
            self._drawn[req_id] = allowed_ids(grammar_bitmask, row)[0]

    def sample_tokens(self) -> ModelRunnerOutput:
        output = self._step.sample_tokens()
        for req_id, token_ids in zip(output.req_ids, output.sampled_token_ids, strict=True):
            if req_id in self._bound and not self._is_lawless:
                token_ids[:] = [self._drawn[req_id]]
        return output


class GrammarExecutor(FakeExecutor):
    """Waits for the grammars of its requests.

    Args:
        lawless_step: From this step on it draws what it likes.
    """

    def __init__(self, kv_cache_config: KVCacheConfig, *, lawless_step: int = 10**9) -> None:
        super().__init__(kv_cache_config, fails_at_step=None)
        self._lawless_step = lawless_step

    def execute_model(self, scheduler_output: SchedulerOutput) -> GrammarStep:
        step = super().execute_model(scheduler_output)
        drawing = {
            req_id
            for req_id, token_ids in zip(
                step._output.req_ids, step._output.sampled_token_ids, strict=True
            )
            if token_ids and self.rows[req_id].needs_grammar
        }
        return GrammarStep(step, drawing, is_lawless=self.num_steps >= self._lawless_step)


def make_grammar_core(max_steps_in_flight: int, **executor: int) -> EngineCore:
    kv_cache_config = make_engine_core()._executor.kv_cache_config
    grammars = GrammarManager(make_compiler())
    scheduler = (AsyncScheduler if max_steps_in_flight > 1 else Scheduler)(
        scheduler_config=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=16),
        cache_config=CacheConfig(block_size=8),
        kv_cache_config=kv_cache_config,
        max_model_len=64,
        grammar_gate=grammars,
    )
    return EngineCore(
        scheduler,
        GrammarExecutor(kv_cache_config, **executor),
        grammars=grammars,
        max_steps_in_flight=max_steps_in_flight,
        max_decode_burst=8,
    )


def bound_request(
    request_id: str, prompt: list[int], choice: list[str], **params: object
) -> AddRequest:
    params["structured_outputs"] = StructuredOutputsParams(choice=choice)
    request = make_request(request_id, prompt, **{"max_tokens": 20, **params})
    request = dataclasses.replace(request, needs_grammar=True, eos_token_ids=(EOS,))
    return AddRequest(request=request)


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_grammars_bind_their_requests_and_no_other(max_steps_in_flight: int) -> None:
    core = make_grammar_core(max_steps_in_flight)
    # One prompt takes several steps; in those it draws nothing.
    core.handle(bound_request("a", [5] * 30, ["yes indeed"]))
    core.handle(AddRequest(request=make_request("b", [7, 8], max_tokens=12)))
    core.handle(bound_request("c", [5], ["no", "never"]))
    outputs = run_until_idle(core)
    assert TOKENIZER.decode(tokens_of(outputs, "a")[:-1]) == "yes indeed"
    assert TOKENIZER.decode(tokens_of(outputs, "c")[:-1]) in ("no", "never")
    assert tokens_of(outputs, "a")[-1] == tokens_of(outputs, "c")[-1] == EOS
    assert tokens_of(outputs, "b") == [7, 8] * 6
    assert core._grammars.num_requests == 0
    core.close()


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_a_grammar_that_cannot_go_on_ends_its_request_alone(max_steps_in_flight: int) -> None:
    core = make_grammar_core(max_steps_in_flight, lawless_step=1)
    core.handle(bound_request("a", [5], ["yes indeed"]))
    core.handle(AddRequest(request=make_request("b", [7, 8], max_tokens=12)))
    outputs = run_until_idle(core)
    (last,) = [o for o in outputs if o.request_id == "a" and o.finish_reason is not None]
    assert last.finish_reason == "error"
    assert last.stop_reason.startswith("the grammar cannot go on")
    assert tokens_of(outputs, "b") == [7, 8] * 6
    assert core.make_stats().num_free_blocks == core.make_stats().num_blocks - 1
    core.close()


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_a_complete_form_ends_its_request_normally(max_steps_in_flight: int) -> None:
    core = make_grammar_core(max_steps_in_flight)
    yes = TOKENIZER.encode("yes", add_special_tokens=False)
    core.handle(bound_request("eos", [5], ["yes"], ignore_eos=True))
    # Nothing may follow it, as the end comes too early, or is none of the allowed tokens.
    core.handle(bound_request("early", [5], ["yes"], min_tokens=10, logprobs=1))
    core.handle(bound_request("none", [5], ["yes"], allowed_token_ids=yes))
    # Also where a stray token would have been the last for another reason.
    core.handle(bound_request("last", [5], ["yes"], allowed_token_ids=yes, max_tokens=len(yes) + 1))
    core.handle(AddRequest(request=make_request("b", [7, 8], max_tokens=12)))
    outputs = run_until_idle(core)
    for request_id in ("eos", "early", "none", "last"):
        ends = [o for o in outputs if o.request_id == request_id and o.finish_reason is not None]
        assert [(o.finish_reason, o.stop_reason) for o in ends] == [("stop", None)], request_id
        drawn = tokens_of(outputs, request_id)
        assert drawn == ([*yes, EOS] if request_id == "eos" else yes)
    assert all(
        len(o.logprobs or ()) == len(o.new_token_ids) for o in outputs if o.request_id == "early"
    )
    assert tokens_of(outputs, "b") == [7, 8] * 6
    assert core._grammars.num_requests == 0
    assert core.make_stats().num_free_blocks == core.make_stats().num_blocks - 1
    core.close()


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_settings_that_leave_a_form_no_token_end_the_request_with_the_reason(
    max_steps_in_flight: int,
) -> None:
    core = make_grammar_core(max_steps_in_flight)
    first, *_ = TOKENIZER.encode("yes", add_special_tokens=False)
    core.handle(bound_request("a", [5], ["yes"], allowed_token_ids=[first, EOS]))
    core.handle(bound_request("c", [5], ["yes"], allowed_token_ids=[EOS]))
    core.handle(AddRequest(request=make_request("b", [7, 8], max_tokens=12)))
    outputs = run_until_idle(core)
    for request_id, drawn in (("a", [first]), ("c", [])):
        (last,) = [o for o in outputs if o.request_id == request_id and o.finish_reason is not None]
        assert (last.finish_reason, last.new_token_ids) == ("error", [])
        assert "leave none of the tokens" in last.stop_reason
        assert tokens_of(outputs, request_id) == drawn
    assert tokens_of(outputs, "b") == [7, 8] * 6
    assert core.make_stats().num_free_blocks == core.make_stats().num_blocks - 1
    core.close()


def test_an_aborted_request_leaves_no_grammar_behind() -> None:
    core = make_grammar_core(1)
    core.handle(bound_request("a", [5], ["yes indeed"]))
    core.handle(AbortRequests(request_ids=["a"]))
    assert core._grammars.num_requests == 0
    core.close()
