"""Grammars restrict only their own requests, and end them when no token may follow."""

import dataclasses
import time

import pytest

from paxkv.config.cache_config import CacheConfig
from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.config.structured_outputs_params import StructuredOutputsParams
from paxkv.contracts.engine_request import AbortRequests, AddRequest
from paxkv.contracts.executor import GrammarBitmask
from paxkv.contracts.kv_cache_spec import KVCacheConfig
from paxkv.contracts.scheduler_output import ModelRunnerOutput, SchedulerOutput, TokenLogprobs
from paxkv.engine.engine_core import EngineCore
from paxkv.engine.grammar_steps import advance_grammars
from paxkv.scheduler.async_scheduler import AsyncScheduler
from paxkv.scheduler.scheduler import Scheduler
from paxkv.structured_output.bound_request import GrammarEnd
from paxkv.structured_output.grammar_manager import GrammarManager
from tests.paxkv.engine.fake_engine import (
    FakeExecutor,
    FakeStep,
    make_engine_core,
    make_request,
)
from tests.paxkv.engine.test_engine_core import run_until_idle, tokens_of
from tests.paxkv.structured_output.demo_grammars import (
    CLOSE,
    EOS,
    OPEN,
    TOKENIZER,
    allowed_ids,
    make_compiler,
)

LOGPROBS = TokenLogprobs(token_logprob=-1.0, token_rank=1, top_token_ids=[], top_logprobs=[])


class GrammarStep:
    """A step in which requests with a grammar sample the first token that it allows."""

    def __init__(self, step: FakeStep, bound: set[str], *, ignores_grammar: bool) -> None:
        self._step = step
        self._bound = bound
        self._ignores_grammar = ignores_grammar
        self._drawn: dict[str, int] = {}
        self.needs_bitmask = bool(bound)
        self.prompt_logprobs: dict[str, list[TokenLogprobs]] = {}

    @property
    def is_done(self) -> bool:
        return self._step.is_done

    def start_sampling(self, grammar_bitmask: GrammarBitmask) -> None:
        assert set(grammar_bitmask.req_ids) == self._bound
        for row, req_id in enumerate(grammar_bitmask.req_ids):
            self._drawn[req_id] = allowed_ids(grammar_bitmask, row)[0]

    def sample_tokens(self) -> ModelRunnerOutput:
        output = self._step.sample_tokens()
        output.prompt_logprobs.update(self.prompt_logprobs)
        for req_id, token_ids in zip(output.req_ids, output.sampled_token_ids, strict=True):
            if req_id in self._bound and not self._ignores_grammar:
                token_ids[:] = [self._drawn[req_id]]
        return output


class GrammarExecutor(FakeExecutor):
    """Waits for the grammars of its requests.

    Args:
        ungrammatical_step: From this step on, sampling ignores the grammars.
    """

    def __init__(self, kv_cache_config: KVCacheConfig, *, ungrammatical_step: int = 10**9) -> None:
        super().__init__(kv_cache_config, fails_at_step=None)
        self._ungrammatical_step = ungrammatical_step

    def execute_model(self, scheduler_output: SchedulerOutput) -> GrammarStep:
        step = super().execute_model(scheduler_output)
        drawing = {
            req_id
            for req_id, token_ids in zip(
                step._output.req_ids, step._output.sampled_token_ids, strict=True
            )
            if token_ids and self.rows[req_id].needs_grammar
        }
        grammar_step = GrammarStep(
            step, drawing, ignores_grammar=self.num_steps >= self._ungrammatical_step
        )
        grammar_step.prompt_logprobs = {
            req_id: [LOGPROBS]
            for req_id in drawing
            if self.rows[req_id].sampling_params.prompt_logprobs is not None
        }
        return grammar_step


class ThinkingStep(GrammarStep):
    """Samples the token that the prompt prescribes if it is allowed, else the last allowed one."""

    def __init__(self, step: FakeStep, bound: set[str]) -> None:
        super().__init__(step, bound, ignores_grammar=False)
        output = step._output
        self._wanted = dict(zip(output.req_ids, output.sampled_token_ids, strict=True))

    def start_sampling(self, grammar_bitmask: GrammarBitmask) -> None:
        for row, req_id in enumerate(grammar_bitmask.req_ids):
            allowed = allowed_ids(grammar_bitmask, row)
            (wanted,) = self._wanted[req_id]
            self._drawn[req_id] = wanted if wanted in allowed else allowed[-1]


class ThinkingExecutor(GrammarExecutor):
    """An executor whose requests produce thoughts."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> ThinkingStep:
        step = super().execute_model(scheduler_output)
        return ThinkingStep(step._step, step._bound)


def make_grammar_core(
    max_steps_in_flight: int,
    executor_class: type[GrammarExecutor] = GrammarExecutor,
    *,
    num_blocks: int = 65,
    **executor: int,
) -> EngineCore:
    kv_cache_config = make_engine_core(num_blocks=num_blocks)._executor.kv_cache_config
    grammars = GrammarManager(make_compiler(thinks=executor_class is ThinkingExecutor))
    scheduler = (AsyncScheduler if max_steps_in_flight > 1 else Scheduler)(
        scheduler_config=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=16),
        cache_config=CacheConfig(block_size=8),
        kv_cache_config=kv_cache_config,
        max_model_len=64,
        grammar_gate=grammars,
    )
    return EngineCore(
        scheduler,
        executor_class(kv_cache_config, **executor),
        grammars=grammars,
        max_steps_in_flight=max_steps_in_flight,
        max_decode_burst=8,
    )


def bound_request(
    request_id: str,
    prompt: list[int],
    choice: list[str],
    thoughts: str = "none",
    **params: object,
) -> AddRequest:
    params["structured_outputs"] = StructuredOutputsParams(choice=choice, thoughts=thoughts)
    request = make_request(request_id, prompt, **{"max_tokens": 20, **params})
    request = dataclasses.replace(request, needs_grammar=True, eos_token_ids=(EOS,))
    return AddRequest(request=request)


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_grammar_restricts_only_its_own_request(max_steps_in_flight: int) -> None:
    core = make_grammar_core(max_steps_in_flight)
    # This prompt takes several steps, which sample no token for it.
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
def test_grammar_without_a_next_token_ends_only_its_request(max_steps_in_flight: int) -> None:
    core = make_grammar_core(max_steps_in_flight, ungrammatical_step=1)
    core.handle(bound_request("a", [5], ["yes indeed"]))
    core.handle(AddRequest(request=make_request("b", [7, 8], max_tokens=12)))
    outputs = run_until_idle(core)
    (last,) = [o for o in outputs if o.request_id == "a" and o.finish_reason is not None]
    assert last.finish_reason == "error"
    assert last.stop_reason.startswith("the grammar of structured_outputs.choice cannot go on")
    assert tokens_of(outputs, "b") == [7, 8] * 6
    assert core.make_stats().num_free_blocks == core.make_stats().num_blocks - 1
    core.close()


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_complete_grammar_ends_its_request_with_stop(max_steps_in_flight: int) -> None:
    core = make_grammar_core(max_steps_in_flight)
    yes = TOKENIZER.encode("yes", add_special_tokens=False)
    core.handle(bound_request("eos", [5], ["yes"], ignore_eos=True))
    # EOS may not follow: it would come before `min_tokens`, or is not an allowed token.
    core.handle(bound_request("early", [5], ["yes"], min_tokens=10, logprobs=1))
    core.handle(bound_request("none", [5], ["yes"], allowed_token_ids=yes))
    # The dropped token would have reached `max_tokens`.
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
def test_settings_that_leave_a_grammar_no_token_give_the_stop_reason(
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


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_grammar_applies_only_after_the_thoughts(max_steps_in_flight: int) -> None:
    core = make_grammar_core(max_steps_in_flight, ThinkingExecutor)
    thoughts = TOKENIZER.encode("no, yes... {", add_special_tokens=False)
    # EOS does not end the thoughts.
    core.handle(bound_request("begun", [*thoughts, EOS, CLOSE], ["yes"], "begun", max_tokens=40))
    core.handle(bound_request("maybe", [OPEN, *thoughts, CLOSE], ["yes"], "maybe", max_tokens=40))
    core.handle(bound_request("none", thoughts, ["yes"], "none", max_tokens=40))
    outputs = run_until_idle(core)
    answer = [*TOKENIZER.encode("yes", add_special_tokens=False), EOS]
    begun, maybe = (tokens_of(outputs, request_id) for request_id in ("begun", "maybe"))
    assert begun[: len(thoughts)] == thoughts and begun[len(thoughts)] != EOS
    assert begun[begun.index(CLOSE) + 1 :] == answer
    assert maybe == [OPEN, *thoughts, CLOSE, *answer]
    assert tokens_of(outputs, "none") == answer
    assert {o.finish_reason for o in outputs if o.finish_reason} == {"stop"}
    core.close()


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_prompt_logprobs_are_returned_if_no_token_may_follow(max_steps_in_flight: int) -> None:
    core = make_grammar_core(max_steps_in_flight)
    core.handle(AddRequest(request=make_request("b", [7, 8], max_tokens=12)))
    outputs = list(core.step().outputs)
    # The regex allows an empty output, and `allowed_token_ids` allow no other.
    params = {"allowed_token_ids": [5], "prompt_logprobs": 0}
    params["structured_outputs"] = StructuredOutputsParams(regex="(yes)?")
    request = make_request("a", [5, 6], **params)
    core.handle(AddRequest(request=dataclasses.replace(request, needs_grammar=True)))
    outputs += run_until_idle(core)
    (last,) = [o for o in outputs if o.request_id == "a"]
    assert (last.finish_reason, last.new_token_ids) == ("stop", [])
    assert last.prompt_logprobs == [LOGPROBS]
    assert tokens_of(outputs, "b") == [7, 8] * 6


def test_complete_grammar_ends_a_preempted_request() -> None:
    core = make_grammar_core(1)
    core.handle(bound_request("a", [5], ["yes"]))
    # As if the request had been preempted after it sampled its last token.
    core._grammars._ended["a"] = GrammarEnd()
    core._scheduler.requests["a"].num_cached_tokens = 8
    (last,) = advance_grammars([], core._scheduler, core._grammars)
    assert (last.request_id, last.finish_reason, last.new_token_ids) == ("a", "stop", [])
    assert last.num_cached_tokens == 8
    assert not core._scheduler.has_unfinished_requests()
    core.close()


def test_prompt_logprobs_are_returned_if_the_request_ends_preempted() -> None:
    ends, num_preempted = [], 0
    # With its 9th token, "b" needs the block of "a". For one of these prompt lengths, that is in
    # the step after the prompt of "a".
    for num_tokens in range(1, 8):
        core = make_grammar_core(2, num_blocks=3)
        core.handle(AddRequest(request=make_request("b", [7] * num_tokens, 9)))
        outputs = core.step().outputs
        params = {"allowed_token_ids": [5], "prompt_logprobs": 0}
        params["structured_outputs"] = StructuredOutputsParams(regex="(yes)?")
        request = make_request("a", [5, 6], **params)
        core.handle(AddRequest(request=dataclasses.replace(request, needs_grammar=True)))
        while not core._grammars.is_ready("a"):
            time.sleep(0.001)
        outputs += run_until_idle(core)
        (last,) = [o for o in outputs if o.request_id == "a"]
        ends.append((last.finish_reason, last.new_token_ids, last.prompt_logprobs))
        num_preempted += core._scheduler.num_preemptions
        assert tokens_of(outputs, "b") == [7] * 9
        core.close()
    assert ends == [("stop", [], [LOGPROBS])] * 7
    assert num_preempted > 0


def test_grammar_of_an_aborted_request_is_removed() -> None:
    core = make_grammar_core(1)
    core.handle(bound_request("a", [5], ["yes indeed"]))
    core.handle(AbortRequests(request_ids=["a"]))
    assert core._grammars.num_requests == 0
    core.close()


def test_outputs_without_grammars_are_unchanged() -> None:
    core = make_engine_core()
    outputs = []
    assert advance_grammars(outputs, core._scheduler, None) is outputs
