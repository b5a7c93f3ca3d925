"""n completions that share blocks equal n requests that share nothing."""

import asyncio
import contextlib
import random

import pytest

from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.request_output import RequestOutput
from tests.end_to_end.checked_engine import (
    BLOCK_SIZE,
    VOCAB_SIZE,
    CheckedCore,
    EngineSettings,
    completions_alone,
    make_llm,
    running_client,
)

N = 3
MAX_TOKENS = 21
# Within a block, at its end, just behind it, one token, and several blocks.
PROMPT_LENGTHS = (13, 16, 17, 1, 43)
PROMPTS = [
    [random.Random(i).randrange(VOCAB_SIZE) for _ in range(length)]
    for i, length in enumerate(PROMPT_LENGTHS)
]
# One request needs up to 8 blocks; three completions of the longest, without sharing, 24.
TINY_POOL = 13
Tokens = list[list[int]]


@pytest.fixture(scope="module")
def alone(tiny_runner) -> list[Tokens]:
    """Of each prompt the N completions, each computed alone by a request that shares nothing."""
    return [
        completions_alone(tiny_runner, prompt, params_of(number))
        for number, prompt in enumerate(PROMPTS)
    ]


def sampling_params(**fields: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.8, "max_tokens": MAX_TOKENS, **fields})


def params_of(prompt_number: int) -> SamplingParams:
    return sampling_params(n=N, seed=1000 * prompt_number + 7)


def tokens_of(output: RequestOutput) -> Tokens:
    assert [c.index for c in output.outputs] == list(range(N))
    assert {c.finish_reason for c in output.outputs} == {"length"}
    return [c.token_ids for c in output.outputs]


# Each size of the pool, and steps with and without others in flight, with and without the cache.
@pytest.mark.parametrize(
    ("num_blocks", "max_num_batched_tokens", "is_ahead", "enable_prefix_caching"),
    [
        (160, 8, False, False),
        (160, 5, True, True),
        (TINY_POOL, 8, True, False),
        (TINY_POOL, 5, False, True),
    ],
)
def test_completions_equal_separate_requests(
    tiny_runner,
    alone: list[Tokens],
    monkeypatch: pytest.MonkeyPatch,
    enable_prefix_caching: bool,
    num_blocks: int,
    max_num_batched_tokens: int,
    is_ahead: bool,
) -> None:
    settings = EngineSettings(
        enable_prefix_caching=enable_prefix_caching,
        is_ahead=is_ahead,
        num_blocks=num_blocks,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    core = CheckedCore(tiny_runner, settings)
    llm = make_llm(monkeypatch, core)
    outputs = llm.generate(PROMPTS, [params_of(i) for i in range(len(PROMPTS))], use_tqdm=False)
    assert [tokens_of(output) for output in outputs] == alone
    # Completions differ, so that a block shared by mistake would be seen.
    assert all(len(set(map(tuple, tokens))) == N for tokens in alone)
    llm.close()
    assert core.num_held_blocks == 0
    assert (core.num_preemptions > 0) == (num_blocks == TINY_POOL)
    assert core.observed.num_block_copies > 0


@pytest.mark.parametrize("number", range(len(PROMPTS)))
def test_each_prompt_is_computed_once_and_its_last_block_copied_where_partly_filled(
    tiny_runner, alone: list[Tokens], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    core = CheckedCore(tiny_runner, EngineSettings())
    llm = make_llm(monkeypatch, core)
    (output,) = llm.generate([PROMPTS[number]], params_of(number), use_tqdm=False)
    assert tokens_of(output) == alone[number]
    llm.close()
    num_prompt_tokens = len(PROMPTS[number])
    # A fork computes the last prompt token itself; the last token drawn is never fed back.
    assert core.observed.num_computed_tokens == (num_prompt_tokens + (N - 1) + N * (MAX_TOKENS - 1))
    # Each fork writes its last prompt token into a block that others hold: copied where that block
    # has tokens before it.
    is_copied = (num_prompt_tokens - 1) % BLOCK_SIZE != 0
    assert core.observed.num_block_copies == (N - 1 if is_copied else 0)


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_fewer_blocks_are_held_than_by_separate_requests(
    tiny_runner, alone: list[Tokens], monkeypatch: pytest.MonkeyPatch, enable_prefix_caching: bool
) -> None:
    number = 4
    most = {}
    for is_sharing in (True, False):
        core = CheckedCore(
            tiny_runner,
            EngineSettings(enable_prefix_caching=enable_prefix_caching, is_sharing=is_sharing),
        )
        llm = make_llm(monkeypatch, core)
        (output,) = llm.generate([PROMPTS[number]], params_of(number), use_tqdm=False)
        assert tokens_of(output) == alone[number]
        llm.close()
        most[is_sharing] = core.observed.most_held_blocks
    print(
        f"n={N}, {len(PROMPTS[number])} + {MAX_TOKENS} tokens, prefix caching "
        f"{enable_prefix_caching}: most blocks held {most[True]} shared, {most[False]} apart"
    )
    # 63 tokens have keys: 8 blocks for each completion, of which the prompt fills 5.
    assert most[True] == 5 + N * 3
    if not enable_prefix_caching:
        # They start one after another, so the first ends a little earlier than the last.
        assert N * 7 < most[False] <= N * 8


def test_without_a_seed_completions_differ(tiny_runner, monkeypatch: pytest.MonkeyPatch) -> None:
    core = CheckedCore(tiny_runner, EngineSettings())
    llm = make_llm(monkeypatch, core)
    (output,) = llm.generate([PROMPTS[0]], sampling_params(n=8), use_tqdm=False)
    assert len({tuple(c.token_ids) for c in output.outputs}) == 8
    llm.close()


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_aborts_in_between_change_nothing_and_leave_the_pool_whole(
    tiny_runner, alone: list[Tokens], enable_prefix_caching: bool
) -> None:
    settings = EngineSettings(enable_prefix_caching=enable_prefix_caching, num_blocks=2 * TINY_POOL)

    async def run() -> int:
        core = CheckedCore(tiny_runner, settings)
        rng = random.Random(3)
        num_whole = 0
        async with running_client(core) as client:

            async def one(request_num: int) -> None:
                nonlocal num_whole
                number = rng.randrange(len(PROMPTS))
                tokens: Tokens = [[] for _ in range(N)]
                num_outputs_wanted = rng.choice([0, 1, 2, 5, 19, 1000, 1000])
                outputs = client.generate(
                    PROMPTS[number], params_of(number), request_id=str(request_num), stream=True
                )
                async with contextlib.aclosing(outputs):
                    while num_outputs_wanted > 0:
                        num_outputs_wanted -= 1
                        output = await anext(outputs, None)
                        if output is None:
                            break
                        for completion in output.outputs:
                            tokens[completion.index] += completion.token_ids
                for index, found in enumerate(tokens):
                    assert found == alone[number][index][: len(found)]
                num_whole += tokens == alone[number]

            await asyncio.gather(*(one(i) for i in range(24)))
            while (stats := await client.get_stats()).num_running_reqs or stats.num_waiting_reqs:
                await asyncio.sleep(0.01)
            assert stats.num_free_blocks == stats.num_blocks - 1
            assert client.num_unfinished_requests == 0
        return num_whole

    assert 2 < asyncio.run(asyncio.wait_for(run(), 120)) < 22
