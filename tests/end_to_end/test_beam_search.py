"""A beam search that shares blocks finds what its definition finds over a model without a cache."""

import asyncio
import contextlib
import functools
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from paxkv.config.sampling_params import BeamSearchParams
from tests.end_to_end.checked_engine import (
    VOCAB_SIZE,
    CheckedCore,
    EngineSettings,
    make_llm,
    running_client,
)
from tests.oracles.dense_model import dense_logits

WIDTH = 4
MAX_TOKENS = 10
PROMPT_LENGTHS = (13, 16, 1, 35)
PROMPTS = [
    [random.Random(i).randrange(VOCAB_SIZE) for _ in range(length)]
    for i, length in enumerate(PROMPT_LENGTHS)
]
# Likely enough at some places that beams end there.
EOS_TOKEN_IDS = (14, 77)
# A search of the longest prompt needs 6 blocks for one beam alone, and 24 for all without sharing.
TINY_POOL = 10
# Room for some searches at once, not for all.
SMALL_POOL = 20
Found = list[tuple[list[int], float]]


@pytest.fixture(scope="module")
def defined(tiny_checkpoint: Path) -> Callable[..., Found]:
    """The search by its definition: every sequence whole through the dense model, each step."""

    @functools.cache
    def logprobs(tokens: tuple[int, ...]) -> np.ndarray:
        logits = dense_logits(tiny_checkpoint, list(tokens))[-1]
        shifted = logits - logits.max()
        return shifted - np.log(np.exp(shifted).sum())

    @functools.cache
    def search(prompt: tuple[int, ...], length_penalty: float, eos: tuple[int, ...]) -> Found:
        def score(found: tuple[list[int], float]) -> float:
            tokens, cum_logprob = found
            return cum_logprob / (len(tokens) - (tokens[-1] in eos)) ** length_penalty

        live: Found = [(list(prompt), 0.0)]
        ended: Found = []
        for _ in range(MAX_TOKENS):
            extended = []
            for tokens, cum_logprob in live:
                row = logprobs(tuple(tokens))
                for token in np.argsort(-row)[: 2 * WIDTH].tolist():
                    extended.append(([*tokens, token], cum_logprob + float(row[token])))
            ended += [found for found in extended if found[0][-1] in eos]
            going_on = [found for found in extended if found[0][-1] not in eos]
            live = sorted(going_on, key=score, reverse=True)[:WIDTH]
        return sorted(ended + live, key=score, reverse=True)[:WIDTH]

    return search


# Together with the slow tests, each setting runs with and without the prefix cache.
@pytest.mark.parametrize(
    ("num_blocks", "length_penalty", "eos", "enable_prefix_caching"),
    [
        (160, 1.0, (), False),
        (160, 1.0, EOS_TOKEN_IDS, True),
        (160, -2.0, EOS_TOKEN_IDS, False),
        (SMALL_POOL, 1.0, EOS_TOKEN_IDS, False),
        (TINY_POOL, 1.0, EOS_TOKEN_IDS, True),
        pytest.param(160, 1.0, (), True, marks=pytest.mark.slow),
        pytest.param(160, 1.0, EOS_TOKEN_IDS, False, marks=pytest.mark.slow),
        pytest.param(160, -2.0, EOS_TOKEN_IDS, True, marks=pytest.mark.slow),
        pytest.param(SMALL_POOL, 1.0, EOS_TOKEN_IDS, True, marks=pytest.mark.slow),
        pytest.param(TINY_POOL, 1.0, EOS_TOKEN_IDS, False, marks=pytest.mark.slow),
    ],
)
def test_search_is_that_of_a_model_without_a_cache(
    tiny_runner,
    defined,
    monkeypatch: pytest.MonkeyPatch,
    enable_prefix_caching: bool,
    num_blocks: int,
    length_penalty: float,
    eos: tuple[int, ...],
) -> None:
    settings = EngineSettings(
        enable_prefix_caching=enable_prefix_caching,
        num_blocks=num_blocks,
        is_ahead=enable_prefix_caching,
    )
    core = CheckedCore(tiny_runner, settings)
    llm = make_llm(monkeypatch, core, eos)
    params = BeamSearchParams(
        beam_width=WIDTH, max_tokens=MAX_TOKENS, length_penalty=length_penalty
    )
    outputs = llm.beam_search(PROMPTS, params)
    worst = 0.0
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        wanted = defined(tuple(prompt), length_penalty, eos)
        assert [s.tokens for s in output.sequences] == [tokens for tokens, _ in wanted]
        for sequence, (tokens, cum_logprob) in zip(output.sequences, wanted, strict=True):
            worst = max(worst, abs(sequence.cum_logprob - cum_logprob))
            assert sequence.finish_reason == ("stop" if tokens[-1] in eos else "length")
    assert worst < 1e-4
    llm.close()
    assert core.num_held_blocks == 0
    print(
        f"beam width {WIDTH}, prefix caching {enable_prefix_caching}, {num_blocks} blocks: "
        f"difference {worst:.1e}, {core.observed.num_block_copies} block copies, "
        f"{core.num_preemptions} preemptions, {core.observed.num_computed_tokens} tokens computed"
    )
    ends = [s.finish_reason for output in outputs for s in output.sequences]
    assert ("stop" in ends) == bool(eos)
    if num_blocks == 160:
        # Each prompt once; then one token for each beam and step.
        num_beams = len(PROMPTS) * WIDTH * (MAX_TOKENS - 1)
        assert core.observed.num_computed_tokens <= sum(PROMPT_LENGTHS) + num_beams


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_fewer_blocks_are_held_than_by_beams_that_copy_everything(
    tiny_runner, defined, monkeypatch: pytest.MonkeyPatch, enable_prefix_caching: bool
) -> None:
    prompt = PROMPTS[3]
    most = {}
    for is_sharing in (True, False):
        core = CheckedCore(
            tiny_runner,
            EngineSettings(enable_prefix_caching=enable_prefix_caching, is_sharing=is_sharing),
        )
        llm = make_llm(monkeypatch, core)
        params = BeamSearchParams(beam_width=WIDTH, max_tokens=MAX_TOKENS)
        (output,) = llm.beam_search([prompt], params)
        assert [s.tokens for s in output.sequences] == [
            tokens for tokens, _ in defined(tuple(prompt), 1.0, ())
        ]
        llm.close()
        most[is_sharing] = (core.observed.most_held_blocks, core.observed.num_computed_tokens)
    print(
        f"beam width {WIDTH}, {len(prompt)} + {MAX_TOKENS} tokens, prefix caching "
        f"{enable_prefix_caching}: most blocks held {most[True][0]} shared, {most[False][0]} "
        f"apart; tokens computed {most[True][1]} and {most[False][1]}"
    )
    assert most[True][1] < most[False][1]
    # 44 tokens have keys: 6 blocks for each beam that shares nothing.
    assert most[True][0] < 6 * WIDTH
    if not enable_prefix_caching:
        assert most[False][0] >= 6 * WIDTH


def test_few_searches_at_once_compute_each_prompt_once_where_all_would_not_fit(
    tiny_runner, defined, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = CheckedCore(tiny_runner, EngineSettings(num_blocks=SMALL_POOL))
    llm = make_llm(monkeypatch, core)
    params = BeamSearchParams(beam_width=WIDTH, max_tokens=MAX_TOKENS)
    outputs = llm.beam_search(PROMPTS, params, concurrency_limit=1)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        wanted = defined(tuple(prompt), 1.0, ())
        assert [s.tokens for s in output.sequences] == [tokens for tokens, _ in wanted]
    llm.close()
    assert core.observed.num_computed_tokens == sum(PROMPT_LENGTHS) + (
        len(PROMPTS) * WIDTH * (MAX_TOKENS - 1)
    )


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_searches_given_up_in_between_change_nothing_and_leave_the_pool_whole(
    tiny_runner, defined, enable_prefix_caching: bool
) -> None:
    settings = EngineSettings(enable_prefix_caching=enable_prefix_caching, num_blocks=SMALL_POOL)
    params = BeamSearchParams(beam_width=WIDTH, max_tokens=MAX_TOKENS)

    async def run() -> int:
        core = CheckedCore(tiny_runner, settings)
        rng = random.Random(5)
        num_whole = 0
        async with running_client(core) as client:

            async def one(request_num: int) -> None:
                nonlocal num_whole
                prompt = rng.choice(PROMPTS)
                outputs = client.beam_search(prompt, params, request_id=str(request_num))
                async with contextlib.aclosing(outputs):
                    output = await anext(outputs)
                found = [prompt + c.token_ids for c in output.outputs]
                assert found == [tokens for tokens, _ in defined(tuple(prompt), 1.0, ())]
                num_whole += 1

            async def one_with_a_limit(request_num: int) -> None:
                with contextlib.suppress(asyncio.TimeoutError):
                    seconds = rng.choice([0.01, 0.05, 0.1, 0.2, 60])
                    await asyncio.wait_for(one(request_num), seconds)

            await asyncio.gather(*(one_with_a_limit(i) for i in range(16)))
            while (stats := await client.get_stats()).num_running_reqs or stats.num_waiting_reqs:
                await asyncio.sleep(0.01)
            assert stats.num_free_blocks == stats.num_blocks - 1
            assert client.num_unfinished_requests == 0
        return num_whole

    assert asyncio.run(asyncio.wait_for(run(), 120)) < 16
