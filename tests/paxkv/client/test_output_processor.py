"""The output processor turns the tokens of steps into the outputs of each caller."""

import dataclasses
import tracemalloc

import pytest

from paxkv.client.output_processor import OutputProcessor, ProcessedOutputs
from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.engine_output import (
    EngineCoreOutput,
    EngineDead,
    RequestTimes,
    SchedulerStats,
    StepOutputs,
)
from paxkv.contracts.engine_request import EngineRequest
from paxkv.contracts.request_output import (
    TOKEN_BUCKETS_S,
    CompletionOutput,
    CompletionTimes,
    Logprob,
    RequestOutput,
    RequestStateStats,
)
from paxkv.contracts.scheduler_output import TokenLogprobs
from paxkv.errors import InvariantError
from tests.paxkv.text.small_tokenizers import byte_level_tokenizer

EOS_ID = 257
NOTHING = ProcessedOutputs(request_outputs=[], request_ids_to_abort=[])


class Caller:
    """An output processor with one request, which receives text as tokens."""

    def __init__(
        self,
        output_kind: str = "delta",
        *,
        tokenizer: bool = True,
        prompt: tuple[int, ...] = (112,),
        packs_logprobs: bool = False,
        **params: object,
    ):
        self.processor = OutputProcessor(
            byte_level_tokenizer() if tokenizer else None, packs_logprobs=packs_logprobs
        )
        request = EngineRequest(
            request_id="r", prompt_token_ids=list(prompt), sampling_params=SamplingParams(**params)
        )
        self.processor.add_request(request, prompt="p", output_kind=output_kind)

    def step(self, tokens: bytes | list[int], **fields: object) -> ProcessedOutputs:
        output = EngineCoreOutput(request_id="r", new_token_ids=list(tokens), **fields)
        return self.processor.process(
            StepOutputs(outputs=[output], stats=SchedulerStats(), timestamp=0.0, monotonic_s=0.0)
        )

    def completion(self, tokens: bytes | list[int], **fields: object) -> CompletionOutput:
        return self.step(tokens, **fields).request_outputs[0].outputs[0]


def test_delta_contains_only_new_text() -> None:
    caller = Caller("delta")
    assert caller.completion(b"ab").text == "ab"
    last = caller.step(b"c", finish_reason="length", num_cached_tokens=1).request_outputs[0]
    assert (last.outputs[0].text, last.outputs[0].token_ids) == ("c", [99])
    assert (last.finished, last.outputs[0].finish_reason) == (True, "length")
    assert (last.request_id, last.prompt, last.prompt_token_ids) == ("r", "p", [112])
    assert last.num_cached_tokens == 1
    assert caller.processor.num_unfinished_requests == 0


def test_ended_or_failed_requests_do_not_affect_others_in_the_step() -> None:
    caller = Caller(max_tokens=9)
    for name in ("gone", "broken", "whole"):
        request = EngineRequest(
            request_id=name, prompt_token_ids=[112], sampling_params=SamplingParams()
        )
        caller.processor.add_request(request, prompt="p", output_kind="delta")
    caller.processor.abort(["gone"])

    def fail(output: EngineCoreOutput, now_s: float) -> None:
        raise RuntimeError("no such token")

    caller.processor._completions["broken"].process = fail
    outputs = [
        EngineCoreOutput(request_id=name, new_token_ids=[97])
        for name in ("gone", "broken", "whole", "r")
    ]
    processed = caller.processor.process(
        StepOutputs(outputs=outputs, stats=SchedulerStats(), timestamp=0.0, monotonic_s=0.0)
    )
    assert [o.request_id for o in processed.request_outputs] == ["whole", "r"]
    assert processed.request_ids_to_abort == ["broken"]
    assert "no such token" in str(processed.errors["broken"])


def test_text_is_complete_if_no_token_may_follow() -> None:
    last = Caller("cumulative").completion(b"ab", finish_reason="stop", stop_reason="none left")
    assert (last.text, last.stop_reason) == ("ab", "none left")


def test_cumulative_output_contains_all_text_so_far() -> None:
    caller = Caller("cumulative")
    caller.step(b"ab")
    assert caller.completion(b"c").text == "abc"
    assert caller.completion(b"", finish_reason="length").token_ids == [97, 98, 99]


def test_final_only_yields_one_output_at_the_end() -> None:
    caller = Caller("final_only")
    assert caller.step(b"ab").request_outputs == []
    assert caller.completion(b"c", finish_reason="length").text == "abc"


def test_ending_token_is_in_the_ids_but_not_in_the_text() -> None:
    caller = Caller("cumulative", stop_token_ids=[10])
    last = caller.completion(b"ab\n", finish_reason="stop", stop_reason=10)
    assert (last.text, last.token_ids, last.stop_reason) == ("ab", [97, 98, 10], 10)
    caller = Caller("cumulative", stop_token_ids=[10], include_stop_str_in_output=True)
    assert caller.completion(b"ab\n", finish_reason="stop", stop_reason=10).text == "ab\n"


def test_stop_string_ends_the_request_and_aborts_it_in_the_engine() -> None:
    caller = Caller("delta", stop=["XY"])
    assert caller.step(b"abX").request_ids_to_abort == []
    processed = caller.step(b"Ycd")
    completion = processed.request_outputs[0].outputs[0]
    assert processed.request_ids_to_abort == ["r"]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "XY")
    # Tokens after the stop string do not count.
    assert (completion.text, completion.token_ids) == ("", [89])
    # A step that was on its way is ignored.
    assert caller.step(b"more") == NOTHING


def test_stop_string_in_the_last_step_needs_no_abort() -> None:
    caller = Caller("final_only", stop=["XY"])
    processed = caller.step(b"aXYb", finish_reason="length")
    assert processed.request_ids_to_abort == []
    completion = processed.request_outputs[0].outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (
        "a",
        "stop",
        "XY",
    )


def test_held_text_is_shown_at_the_end() -> None:
    caller = Caller("delta", stop=["XY"])
    assert caller.completion(b"aX").text == "a"
    assert caller.completion([EOS_ID], finish_reason="stop").text == "X"


def test_logprobs_begin_with_the_sampled_token() -> None:
    caller = Caller("delta", logprobs=2)
    logprobs = TokenLogprobs(
        token_logprob=-3.0, token_rank=3, top_token_ids=[97, 98], top_logprobs=[-0.5, -1.0]
    )
    completion = caller.completion(b"c", logprobs=[logprobs])
    assert list(completion.logprobs[0].items()) == [
        (99, Logprob(logprob=-3.0, rank=3, decoded_token="c")),
        (97, Logprob(logprob=-0.5, rank=1, decoded_token="a")),
        (98, Logprob(logprob=-1.0, rank=2, decoded_token="b")),
    ]
    logprobs = TokenLogprobs(
        token_logprob=-0.5, token_rank=1, top_token_ids=[97, 98], top_logprobs=[-0.5, -1.0]
    )
    completion = caller.completion(b"a", logprobs=[logprobs], finish_reason="length")
    assert completion.cumulative_logprob == -3.5
    assert [list(entry) for entry in completion.logprobs] == [[97, 98]]


def test_without_a_tokenizer_text_is_empty() -> None:
    caller = Caller("cumulative", tokenizer=False, logprobs=0)
    logprobs = TokenLogprobs(token_logprob=-1.0, token_rank=1, top_token_ids=[], top_logprobs=[])
    completion = caller.completion(b"a", logprobs=[logprobs])
    assert (completion.text, completion.token_ids) == ("", [97])
    assert completion.logprobs == [{97: Logprob(logprob=-1.0, rank=1, decoded_token="")}]


def test_detokenize_false_makes_no_text() -> None:
    assert Caller("cumulative", detokenize=False).completion(b"ab").text == ""


def test_abort_returns_the_output_so_far_and_forgets_the_request() -> None:
    caller = Caller("final_only")
    caller.step(b"a\xc3")
    processed = caller.processor.abort(["r", "unknown"])
    assert processed.request_ids_to_abort == ["r"]
    (output,) = processed.request_outputs
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("a�", "abort")
    assert output.finished
    assert caller.processor.abort(["r"]) == NOTHING
    assert caller.step(b"b").request_outputs == []


def test_error_of_the_engine_is_passed_on() -> None:
    assert Caller("delta").completion(b"", finish_reason="error").finish_reason == "error"


def test_request_id_cannot_be_added_twice() -> None:
    caller = Caller()
    request = EngineRequest(request_id="r", prompt_token_ids=[1], sampling_params=SamplingParams())
    with pytest.raises(InvariantError):
        caller.processor.add_request(request, prompt=None, output_kind="delta")


def test_prompt_logprobs_are_once_in_deltas_and_always_in_other_outputs() -> None:
    found = [
        TokenLogprobs(token_logprob=-2.0, token_rank=3, top_token_ids=[97], top_logprobs=[-0.5])
    ]
    for kind, stays in (("delta", False), ("cumulative", True)):
        caller = Caller(kind, prompt=[112, 113], prompt_logprobs=1)
        first = caller.step(b"a", prompt_logprobs=found).request_outputs[0].prompt_logprobs
        assert first == [
            None,
            {
                113: Logprob(logprob=-2.0, rank=3, decoded_token="q"),
                97: Logprob(logprob=-0.5, rank=1, decoded_token="a"),
            },
        ]
        later = caller.step(b"b").request_outputs[0].prompt_logprobs
        assert later == (first if stays else None)
    caller = Caller("final_only", prompt=[112], prompt_logprobs=1)
    assert caller.step(b"a", prompt_logprobs=[]).request_outputs == []
    (last,) = caller.step(b"b", finish_reason="length").request_outputs
    assert last.prompt_logprobs == [None]


def test_finished_completion_has_the_durations_of_its_phases() -> None:
    processor = OutputProcessor(None)
    request = EngineRequest(
        request_id="r", prompt_token_ids=[1], sampling_params=SamplingParams(), arrival_time=100.0
    )
    processor.add_request(request, prompt=None, output_kind="delta")

    monotonic_s = iter((7.0, 8.0, 11.0))

    def step(timestamp: float, **fields: object) -> RequestOutput:
        times = fields.pop("times", {})
        output = EngineCoreOutput(request_id="r", new_token_ids=[5], **fields)
        outputs = StepOutputs(
            outputs=[output],
            stats=SchedulerStats(),
            timestamp=timestamp,
            monotonic_s=next(monotonic_s),
            request_times=times,
        )
        return processor.process(outputs).request_outputs[0]

    first = step(103.0, times={"r": RequestTimes(queue_s=1.0, prefill_s=1.5)})
    assert first.outputs[0].times is None
    # The wall clock is set back.
    second = step(
        90.0,
        times={"other": RequestTimes(queue_s=9.0, prefill_s=9.0)},
        num_draft_tokens=3,
        num_accepted_tokens=2,
    )
    assert second.outputs[0].times is second.metrics is None
    last = step(907.0, finish_reason="length", num_draft_tokens=1)
    assert last.outputs[0].times == CompletionTimes(
        queue_s=1.0, prefill_s=1.5, decode_s=4.0, first_token_s=3.0
    )
    # The first token came at 7.0 on the engine's clock.
    assert last.metrics == RequestStateStats(
        num_generation_tokens=3,
        arrival_time=100.0,
        queued_ts=4.5,
        scheduled_ts=5.5,
        first_token_ts=7.0,
        last_token_ts=11.0,
        first_token_latency=3.0,
        num_draft_tokens=4,
        num_accepted_tokens=2,
    )
    later = dataclasses.replace(
        last.metrics, scheduled_ts=6.0, first_token_ts=8.0, last_token_ts=12.5
    )
    outputs = [*last.outputs, dataclasses.replace(last.outputs[0], index=1, metrics=later)]
    assert dataclasses.replace(last, outputs=outputs).metrics == dataclasses.replace(
        last.metrics,
        num_generation_tokens=6,
        last_token_ts=12.5,
        num_draft_tokens=8,
        num_accepted_tokens=4,
    )


@pytest.mark.parametrize("output_kind", ["cumulative", "delta", "final_only"])
def test_tokens_are_counted_when_they_arrive_for_every_output_kind(output_kind: str) -> None:
    caller = Caller(output_kind, prompt=(112, 113, 114), stop=["XY"])

    def counted() -> tuple[int, ...]:
        totals = caller.processor.token_totals
        num_waits = sum(totals.token_latency_counts)
        num_cached = totals.num_cached_prompt_tokens
        return totals.num_prompt_tokens, num_cached, totals.num_generation_tokens, num_waits

    assert counted() == (0, 0, 0, 0)
    caller.step(b"a", num_cached_tokens=2)
    assert counted() == (3, 2, 1, 0)
    caller.step(b"bcd", num_cached_tokens=2)
    assert counted() == (3, 2, 4, 3)
    # The token after the stop string was sampled, although the caller does not receive it.
    caller.step(b"XYZ", num_cached_tokens=2)
    assert counted() == (3, 2, 7, 6)
    # A step that was in flight when the request ended does not count.
    caller.step(b"e")
    assert counted() == (3, 2, 7, 6)


def test_tokens_of_an_aborted_request_stay_counted() -> None:
    caller = Caller("final_only")
    caller.step(b"ab")
    caller.processor.abort(["r"])
    caller.step(b"c")
    totals = caller.processor.token_totals
    assert (totals.num_prompt_tokens, totals.num_generation_tokens) == (1, 2)


def test_prompt_of_several_completions_or_forks_counts_once() -> None:
    caller = Caller("final_only", prompt=(112, 113), n=3, temperature=1.0)
    fork = EngineRequest(
        request_id="beam",
        prompt_token_ids=[112, 113, 97],
        sampling_params=SamplingParams(),
        fork_from="0_r",
    )
    caller.processor.add_request(fork, prompt=None, output_kind="final_only")
    outputs = [
        EngineCoreOutput(request_id=request_id, new_token_ids=[97], num_cached_tokens=1)
        for request_id in ("0_r", "1_r", "2_r", "beam")
    ]
    caller.processor.process(
        StepOutputs(outputs=outputs, stats=SchedulerStats(), timestamp=0.0, monotonic_s=0.0)
    )
    totals = caller.processor.token_totals
    assert (totals.num_prompt_tokens, totals.num_cached_prompt_tokens) == (2, 1)
    assert totals.num_generation_tokens == 4


def test_token_counts_do_not_depend_on_the_order_of_outputs() -> None:
    processor = OutputProcessor(None)
    for name in "abcd":
        request = EngineRequest(
            request_id=name, prompt_token_ids=[1], sampling_params=SamplingParams(max_tokens=99)
        )
        processor.add_request(request, prompt=None, output_kind="final_only")
    # Time in seconds, and one letter per token of each request.
    for now_s, step in ((1.0, "ac"), (2.0, "abcd"), (3.0, "aabccd"), (5.0, "abbc")):
        outputs = [
            EngineCoreOutput(request_id=name, new_token_ids=[5] * step.count(name))
            for name in dict.fromkeys(step)
        ]
        processor.process(
            StepOutputs(outputs=outputs, stats=SchedulerStats(), timestamp=0.0, monotonic_s=now_s)
        )
    totals = processor.token_totals
    assert totals.num_generation_tokens == 2 + 4 + 6 + 4
    counts = dict(zip(TOKEN_BUCKETS_S, totals.token_latency_counts, strict=False))
    # Shares of 0.5 s, tokens of 1 s, and those of the last step: two of 2 s and two of 1 s.
    assert {bound: count for bound, count in counts.items() if count} == {0.5: 4, 1.0: 6, 2.5: 2}
    assert totals.token_latency_sum_s == 2 + 4 + 6


def test_tokens_are_counted_for_the_engine_of_the_step() -> None:
    processor = OutputProcessor(None, num_engines=3)
    # Two completions of one prompt without a fork, on two engines.
    request = EngineRequest(
        request_id="r",
        prompt_token_ids=[1, 2, 3],
        sampling_params=SamplingParams(n=2, temperature=1.0),
    )
    children = processor.add_request(request, prompt=None, output_kind="final_only")
    for child, engine_idx, num_tokens in zip(children, (0, 2), (1, 4), strict=True):
        output = EngineCoreOutput(request_id=child.request_id, new_token_ids=[5] * num_tokens)
        step = StepOutputs(
            outputs=[output],
            stats=SchedulerStats(),
            timestamp=0.0,
            monotonic_s=0.0,
            engine_idx=engine_idx,
        )
        processor.process(step)
    totals = processor.token_totals
    assert [one.num_generation_tokens for one in totals.engines] == [1, 0, 4]
    assert [one.num_prompt_tokens for one in totals.engines] == [3, 0, 0]
    assert (totals.num_generation_tokens, totals.num_prompt_tokens) == (5, 3)


def test_request_ends_when_the_engine_of_one_completion_dies() -> None:
    caller = Caller("delta", n=2, temperature=1.0)
    ids = [child.request_id for child in caller.processor._parents["r"].children]
    dead = EngineDead(reason="boom.", retry_after_s=1, request_ids=(ids[0], "unknown"))
    processed = caller.processor.end_with_engine(dead)
    (error,) = processed.errors.values()
    assert "has ended: boom. Others go on" in str(error) and error.retry_after_s == 1
    # The other completion may run on a living engine.
    assert (list(processed.errors), processed.request_ids_to_abort) == (["r"], ids)
    assert caller.processor.num_unfinished_requests == 0
    late = EngineCoreOutput(request_id=ids[1], new_token_ids=[97])
    step = StepOutputs(outputs=[late], stats=SchedulerStats(), timestamp=0.0, monotonic_s=0.0)
    assert caller.processor.process(step) == NOTHING
    assert caller.processor.end_with_engine(dead) == NOTHING


def test_delivered_logprobs_of_a_stream_are_not_kept() -> None:
    caller = Caller("delta", logprobs=20, max_tokens=1000)
    tops = list(range(60, 80))
    logprobs = TokenLogprobs(
        token_logprob=-3.0, token_rank=30, top_token_ids=tops, top_logprobs=[-0.5] * 20
    )
    for _ in range(10):
        caller.completion(b"c", logprobs=[logprobs])
    tracemalloc.start()
    for _ in range(200):
        caller.completion(b"c", logprobs=[logprobs])
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # 200 positions of 21 tokens would be 600,000 bytes.
    assert num_bytes < 60_000


def test_logprobs_of_final_only_outputs_are_packed() -> None:
    tops = list(range(60, 80))
    logprobs = TokenLogprobs(
        token_logprob=-3.0, token_rank=30, top_token_ids=tops, top_logprobs=[-0.5] * 20
    )
    found, num_bytes = [], []
    for packs_logprobs in (False, True):
        caller = Caller("final_only", logprobs=20, packs_logprobs=packs_logprobs)
        tracemalloc.start()
        for _ in range(200):
            caller.step(b"c", logprobs=[logprobs])
        num_bytes.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        found.append(caller.completion(b"d", logprobs=[logprobs], finish_reason="length").logprobs)
    plain, packed = found
    assert num_bytes[1] < num_bytes[0] / 3
    assert plain == list(packed) == packed[:] and len(plain) == len(packed) == 201
    assert (packed[0], packed[-1], packed[198:]) == (plain[0], plain[-1], plain[198:])
    with pytest.raises(IndexError):
        packed[201]


def test_drafts_of_a_completion_are_added_up() -> None:
    caller = Caller("delta", stop=["X"])

    def numbers(tokens: bytes, **drafts: int) -> tuple[int, int]:
        completion = caller.completion(tokens, **drafts)
        return completion.num_draft_tokens, completion.num_accepted_tokens

    assert numbers(b"a") == (0, 0)
    assert numbers(b"bcd", num_draft_tokens=4, num_accepted_tokens=2) == (4, 2)
    assert numbers(b"e") == (4, 2)
    assert numbers(b"fX", num_draft_tokens=3, num_accepted_tokens=1) == (7, 3)


def test_output_has_the_number_of_preemptions() -> None:
    caller = Caller("delta", stop=["X"])
    assert caller.completion(b"a").num_preemptions == 0
    assert caller.completion(b"b", num_preemptions=2).num_preemptions == 2
    assert caller.completion(b"X", num_preemptions=2).num_preemptions == 2
