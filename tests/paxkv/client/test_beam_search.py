"""Beam search finds the sequences of its definition, and releases all blocks that it keeps."""

import asyncio
import contextlib
import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxkv.client.async_client import AsyncEngineClient
from paxkv.client.beam_search import BeamSearch, prompt_params
from paxkv.config.sampling_params import BeamSearchParams, SamplingParams
from paxkv.contracts.engine_request import EngineRequest
from paxkv.contracts.request_output import CompletionOutput, Logprob, RequestOutput
from paxkv.errors import (
    EngineDeadError,
    InvalidRequestError,
    InvariantError,
    PromptTooLongError,
)
from tests.paxkv.client.test_async_client import collect, in_loop, running, until_idle
from tests.paxkv.text.small_tokenizers import byte_level_tokenizer

EOS = 0


def next_logprobs(tokens: list[int], vocab_size: int, seed: int) -> list[float]:
    """A made-up model: log-probabilities of the next token that depend on all tokens so far."""
    rng = random.Random(f"{seed} {tokens}")
    weights = [rng.random() + 0.01 for _ in range(vocab_size)]
    total = sum(weights)
    return [math.log(weight / total) for weight in weights]


def answer(request: EngineRequest, vocab_size: int, seed: int) -> RequestOutput:
    """The engine's output for one request of a search step."""
    logprobs = next_logprobs(request.prompt_token_ids, vocab_size, seed)
    ranked = sorted(range(vocab_size), key=lambda token: -logprobs[token])
    found = {
        token: Logprob(logprob=logprobs[token], rank=rank, decoded_token="")
        for rank, token in enumerate(ranked[: request.sampling_params.logprobs], start=1)
    }
    completion = CompletionOutput(
        index=0, text="", token_ids=[ranked[0]], logprobs=[found], finish_reason="length"
    )
    return RequestOutput(
        request_id=request.request_id,
        prompt=None,
        prompt_token_ids=request.prompt_token_ids,
        outputs=[completion],
        finished=True,
        num_cached_tokens=len(request.prompt_token_ids) - 1,
    )


def make_search(prompt: list[int], vocab_size: int, params: BeamSearchParams) -> BeamSearch:
    request = EngineRequest(
        request_id="7",
        prompt_token_ids=prompt,
        sampling_params=prompt_params(params),
        eos_token_ids=(EOS,),
        priority=3,
    )
    return BeamSearch(request, params, vocab_size=vocab_size)


def run(search: BeamSearch, vocab_size: int, seed: int) -> list[list[EngineRequest]]:
    """Runs a search; returns its steps. Checks that the fork sources still keep their blocks."""
    steps = []
    held: set[str] = set()
    while requests := search.next_requests():
        steps.append(requests)
        for request in requests:
            assert request.fork_from is None or request.fork_from in held
            assert request.keep_blocks
        held |= {request.request_id for request in requests}
        for request in random.Random(seed).sample(requests, len(requests)):
            is_last = search.record_output(answer(request, vocab_size, seed))
        assert is_last
        assert set(search.released_ids) <= held
        held -= set(search.released_ids)
        search.clear_released_ids()
        assert held == set(search.request_ids)
    assert not held
    return steps


def search_by_definition(
    prompt: list[int], vocab_size: int, seed: int, params: BeamSearchParams
) -> list[tuple[list[int], float]]:
    """Every step: extend each live sequence by its 2 * width likeliest tokens, keep the best."""

    def score(found: tuple[list[int], float]) -> float:
        tokens, cum_logprob = found
        length = len(tokens)
        if tokens[-1] == EOS and not params.ignore_eos:
            length -= 1
        return cum_logprob / length**params.length_penalty

    live, done = [(prompt, 0.0)], []
    for _ in range(params.max_tokens):
        extended = []
        for tokens, cum_logprob in live:
            logprobs = next_logprobs(tokens, vocab_size, seed)
            ranked = sorted(range(vocab_size), key=lambda token: -logprobs[token])
            for token in ranked[: 2 * params.beam_width]:
                extended.append(([*tokens, token], cum_logprob + logprobs[token]))
        if not params.ignore_eos:
            done += [found for found in extended if found[0][-1] == EOS]
            extended = [found for found in extended if found[0][-1] != EOS]
        live = sorted(extended, key=score, reverse=True)[: params.beam_width]
    return sorted(done + live, key=score, reverse=True)[: params.beam_width]


@given(
    prompt=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    vocab_size=st.integers(1, 12),
    seed=st.integers(0, 10**6),
    beam_width=st.integers(1, 4),
    max_tokens=st.integers(1, 5),
    ignore_eos=st.booleans(),
    length_penalty=st.sampled_from([-1.0, 0.0, 0.7, 1.0, 2.0]),
)
def test_search_equals_a_direct_implementation(prompt, vocab_size, seed, **fields) -> None:
    params = BeamSearchParams(**fields)
    search = make_search(prompt, vocab_size, params)
    run(search, vocab_size, seed)
    found = search.output(None).sequences
    wanted = search_by_definition(prompt, vocab_size, seed, params)
    assert [s.tokens for s in found] == [tokens for tokens, _ in wanted]
    assert [s.cum_logprob for s in found] == pytest.approx([logprob for _, logprob in wanted])
    for sequence in found:
        has_eos = sequence.tokens[-1] == EOS and not params.ignore_eos
        assert sequence.finish_reason == ("stop" if has_eos else "length")
        new_tokens = sequence.tokens[len(prompt) :]
        drawn = [p[token].logprob for p, token in zip(sequence.logprobs, new_tokens, strict=True)]
        assert sum(drawn) == pytest.approx(sequence.cum_logprob)


def test_wide_beam_finds_the_most_likely_sequence() -> None:
    vocab_size, seed = 3, 11
    params = BeamSearchParams(beam_width=9, max_tokens=3, ignore_eos=True, length_penalty=0.0)
    search = make_search([1], vocab_size, params)
    run(search, vocab_size, seed)

    def cum_logprob(tokens: tuple[int, ...]) -> float:
        return sum(
            next_logprobs([1, *tokens[:i]], vocab_size, seed)[tokens[i]] for i in range(len(tokens))
        )

    everything = itertools.product(range(vocab_size), repeat=3)
    best = sorted(everything, key=cum_logprob, reverse=True)[:9]
    assert [tuple(s.tokens[1:]) for s in search.output(None).sequences] == best


def test_beam_forks_from_its_parent_and_computes_one_token() -> None:
    search = make_search([1, 2], 8, BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True))
    first, second, third = run(search, 8, seed=5)
    assert [(r.request_id, r.prompt_token_ids, r.fork_from) for r in first] == [
        ("0_0_7", [1, 2], None)
    ]
    assert [r.request_id for r in second] == ["1_0_7", "1_1_7"]
    assert [r.fork_from for r in second] == ["0_0_7", "0_0_7"]
    prompts = {r.request_id: r.prompt_token_ids for r in (*first, *second, *third)}
    for request in (*second, *third):
        assert request.prompt_token_ids[:-1] == prompts[request.fork_from]
    assert first[0].sampling_params == SamplingParams(
        max_tokens=1, temperature=0.0, logprobs=4, ignore_eos=True, detokenize=False
    )
    assert first[0].priority == 3


def test_parents_are_released_when_all_their_forks_are_computed() -> None:
    search = make_search([1, 2], 8, BeamSearchParams(beam_width=2, max_tokens=2, ignore_eos=True))
    (first,) = search.next_requests()
    search.record_output(answer(first, 8, seed=5))
    assert search.released_ids == []
    second = search.next_requests()
    assert not search.record_output(answer(second[1], 8, seed=5))
    assert search.released_ids == []
    assert sorted(search.request_ids) == ["0_0_7", "1_0_7", "1_1_7"]
    assert search.record_output(answer(second[0], 8, seed=5))
    assert sorted(search.released_ids) == ["0_0_7", "1_0_7", "1_1_7"]
    assert search.next_requests() == []


def test_number_of_candidates_is_limited_by_the_vocabulary() -> None:
    search = make_search([1], 3, BeamSearchParams(beam_width=4, max_tokens=2))
    (request,) = search.next_requests()
    assert request.sampling_params.logprobs == 3


def test_sampled_token_is_a_candidate() -> None:
    search = make_search([1], 8, BeamSearchParams(beam_width=1, max_tokens=1, temperature=2.0))
    (request,) = search.next_requests()
    assert request.sampling_params.temperature == 2.0
    output = answer(request, 8, seed=1)
    output.outputs[0].logprobs[0][6] = Logprob(logprob=1.0, rank=7, decoded_token="")
    search.record_output(output)
    assert search.output(None).sequences[0].tokens == [1, 6]


def test_search_ends_when_every_beam_has_reached_eos() -> None:
    search = make_search([1], 1, BeamSearchParams(beam_width=2, max_tokens=9))
    steps = run(search, 1, seed=0)
    assert len(steps) == 1
    (sequence,) = search.output(None).sequences
    assert (sequence.tokens, sequence.finish_reason) == ([1, EOS], "stop")


@pytest.mark.parametrize(("is_shown", "text"), [(False, "a"), (True, "a</s>")])
def test_completion_has_only_the_new_part_of_the_text(is_shown: bool, text: str) -> None:
    eos = 257
    params = BeamSearchParams(beam_width=1, max_tokens=2, include_stop_str_in_output=is_shown)
    request = EngineRequest(
        request_id="7",
        prompt_token_ids=[ord("p")],
        sampling_params=prompt_params(params),
        eos_token_ids=(eos,),
    )
    search = BeamSearch(request, params, vocab_size=258)
    for token in (ord("a"), eos):
        (step,) = search.next_requests()
        output = answer(step, 3, seed=0)
        found = {token: Logprob(logprob=-0.5, rank=1, decoded_token="")}
        output.outputs[0].logprobs[0] = found
        search.record_output(output)
    tokenizer = byte_level_tokenizer()
    (sequence,) = search.output(tokenizer).sequences
    assert (sequence.tokens, sequence.text) == ([ord("p"), ord("a"), eos], "p" + text)
    (completion,) = search.completions(tokenizer)
    assert (completion.token_ids, completion.text) == ([ord("a"), eos], text)
    assert (completion.index, completion.cumulative_logprob) == (0, -1.0)
    assert completion.finish_reason == "stop"


def test_refused_step_raises_invariant_error() -> None:
    search = make_search([1], 3, BeamSearchParams(beam_width=1, max_tokens=2))
    (request,) = search.next_requests()
    completion = CompletionOutput(index=0, text="", token_ids=[], finish_reason="error")
    output = RequestOutput(
        request_id=request.request_id,
        prompt=None,
        prompt_token_ids=[1],
        outputs=[completion],
        finished=True,
    )
    with pytest.raises(InvariantError, match="refused"):
        search.record_output(output)


def test_params_of_another_class_are_rejected() -> None:
    with pytest.raises(InvalidRequestError, match="BeamSearchParams"):
        prompt_params(SamplingParams())


async def search(
    client: AsyncEngineClient, prompt: object, request_id: str = "r", **params: object
) -> RequestOutput:
    beam_params = BeamSearchParams(**{"beam_width": 2, "max_tokens": 6, **params})
    (output,) = [o async for o in client.beam_search(prompt, beam_params, request_id=request_id)]
    return output


@in_loop
async def test_beam_search_yields_its_sequences_as_completions() -> None:
    async with running() as client:
        # The fake's only candidates are the first token of the prompt at -0.5 and "a" at -2.
        output = await search(client, "xyz")
        assert (output.request_id, output.prompt, output.finished) == ("r", "xyz", True)
        assert output.prompt_token_ids == list(b"xyz")
        best, second = output.outputs
        assert (best.index, best.text, best.cumulative_logprob) == (0, "xxxxxx", -3.0)
        # One "a" in it; all places are equal, and the first found stays.
        assert (second.index, second.cumulative_logprob) == (1, -4.5)
        assert sorted(second.text) == sorted("axxxxx")
        assert {c.finish_reason for c in output.outputs} == {"length"}
        await until_idle(client)
        outputs = await asyncio.gather(*(search(client, "xyz", str(i)) for i in range(8)))
        assert {o.outputs[0].text for o in outputs} == {"xxxxxx"}
        await until_idle(client)


@in_loop
async def test_aborted_beam_search_leaves_no_request_or_block() -> None:
    async with running(step_s=0.03) as client:
        for pause in range(12):
            # Far more than is computed in the pauses, however long they last.
            task = asyncio.create_task(search(client, "xyz", max_tokens=240))
            await asyncio.sleep(0.03 * pause)
            if pause % 2:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            else:
                await asyncio.sleep(0.01)
                await client.abort("r")
                output = await task
                assert {c.finish_reason for c in output.outputs} == {"abort"}
            await until_idle(client)
        assert client.num_unfinished_requests == 0
        assert not client._streams._by_engine_id


@in_loop
async def test_beam_search_validates_its_params_and_prompt_length() -> None:
    async with running() as client:
        with pytest.raises(PromptTooLongError):
            await search(client, "x" * 300)
        with pytest.raises(InvalidRequestError, match="BeamSearchParams"):
            async for _ in client.beam_search("x", SamplingParams(), request_id="r"):
                pass
        with pytest.raises(InvalidRequestError, match="got BeamSearchParams"):
            await collect(client, "x", BeamSearchParams(beam_width=1, max_tokens=1), "r")
        assert client.num_unfinished_requests == 0


@in_loop
async def test_dead_engine_ends_a_beam_search() -> None:
    async with running(fails_at_step=3) as client:
        with pytest.raises(EngineDeadError):
            await search(client, "xyz", max_tokens=100)
        assert client.num_unfinished_requests == 0


@in_loop
async def test_beam_search_ends_at_its_next_step_when_the_engine_drains() -> None:
    async with running(step_s=0.1) as client:
        task = asyncio.create_task(search(client, "xyz", max_tokens=100))
        while not (await client.get_stats()).num_steps:
            await asyncio.sleep(0.01)
        closing = asyncio.create_task(client.close(drain_timeout_s=30))
        with pytest.raises(EngineDeadError):
            await task
        await closing
