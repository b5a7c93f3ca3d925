"""Several prompts at once: their outputs interleave, and they end together."""

import asyncio
from contextlib import aclosing

import pytest

from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.engine_output import SchedulerStats
from paxkv.errors import EngineDeadError, InvalidRequestError
from paxkv.server.generation import Generator
from paxkv.server.metrics.server_metrics import ServerMetrics
from tests.paxkv.server.fake_engine import (
    DIE_AFTER_3,
    GRAMMAR_FAILS,
    FakeEngine,
    answer_token_ids,
)


def _prompt(*token_ids):
    return {"prompt_token_ids": list(token_ids)}


def _generate(engine, prompts, *, max_tokens=6, stream=True):
    return Generator(engine, ServerMetrics("m")).generate(
        prompts, SamplingParams(max_tokens=max_tokens), priority=0, stream=stream
    )


def test_every_prompt_gets_its_own_outputs_in_order():
    async def run():
        got = {0: [], 1: [], 2: []}
        prompts = [_prompt(1), _prompt(2), _prompt(3)]
        async with aclosing(_generate(FakeEngine(), prompts)) as outputs:
            async for prompt_idx, output in outputs:
                got[prompt_idx] += output.outputs[0].token_ids
        assert got == {i: answer_token_ids([i + 1], 6) for i in range(3)}

    asyncio.run(run())


@pytest.mark.parametrize("num_prompts", [1, 4])
def test_closing_early_aborts_every_prompt(num_prompts):
    async def run():
        engine = FakeEngine()
        prompts = [_prompt(i) for i in range(num_prompts)]
        async with aclosing(_generate(engine, prompts, max_tokens=100)) as outputs:
            await anext(outputs)
            assert len(engine.running) == num_prompts
        assert not engine.running
        assert len(engine.aborted) == num_prompts

    asyncio.run(run())


def test_one_failure_ends_all_with_its_error():
    async def run(bad_prompt, error):
        engine = FakeEngine(seconds_per_token=0.001)
        with pytest.raises(error):
            prompts = [_prompt(1), bad_prompt, _prompt(2)]
            async for _ in _generate(engine, prompts, max_tokens=100):
                pass
        assert not engine.running

    asyncio.run(run(_prompt(999), InvalidRequestError))
    dying = {"prompt": DIE_AFTER_3, "add_special_tokens": False}
    asyncio.run(run(dying, EngineDeadError))


def test_every_completion_is_counted_when_it_ends_and_each_prompt_once():
    async def run():
        engine, metrics = FakeEngine(), ServerMetrics("m")
        params = SamplingParams(max_tokens=6, n=3)
        outputs = Generator(engine, metrics).generate(
            [_prompt(1), _prompt(2, 3)], params, priority=0, stream=True
        )
        async for _ in outputs:
            pass
        return metrics.render(SchedulerStats(), engine.token_totals).decode()

    lines = asyncio.run(run()).splitlines()
    samples = [line.rsplit(" ", 1) for line in lines if line and not line.startswith("#")]
    value = {name: float(number) for name, number in samples}
    assert value['vllm:prompt_tokens_total{engine="0",model_name="m"}'] == 3
    # The fake's completion i is i tokens shorter.
    assert value['vllm:generation_tokens_total{engine="0",model_name="m"}'] == 2 * (6 + 5 + 4)
    name = 'vllm:request_success_total{engine="0",finished_reason="length",model_name="m"}'
    assert value[name] == 6
    # One first token of each prompt; 5 + 4 + 3 gaps within the completions of each.
    assert value['vllm:time_to_first_token_seconds_count{engine="0",model_name="m"}'] == 2
    assert value['vllm:inter_token_latency_seconds_count{engine="0",model_name="m"}'] == 24


def test_slow_reader_holds_the_engine_back_instead_of_filling_memory():
    async def run():
        engine = FakeEngine()
        async with aclosing(_generate(engine, [_prompt(1), _prompt(2)], max_tokens=500)) as outputs:
            await anext(outputs)
            await asyncio.sleep(0.05)
            # The engine's generators wait at their second or third output.
            assert len(engine.running) == 2

    asyncio.run(run())


def test_a_grammar_that_fails_is_the_requests_fault():
    async def run():
        prompt = {"prompt": GRAMMAR_FAILS, "add_special_tokens": False}
        with pytest.raises(InvalidRequestError, match="it is too large"):
            async for _ in _generate(FakeEngine(), [prompt], max_tokens=5):
                pass

    asyncio.run(run())


def test_requests_refused_without_an_engine_are_not_counted_as_ended():
    async def run(*, is_alive):
        engine, metrics = FakeEngine(), ServerMetrics("m")
        engine.is_alive = is_alive
        dying = {"prompt": DIE_AFTER_3, "add_special_tokens": False}
        with pytest.raises(EngineDeadError):
            async for _ in Generator(engine, metrics).generate(
                [dying], SamplingParams(), priority=0, stream=True
            ):
                pass
        text = metrics.render(SchedulerStats(), engine.token_totals).decode()
        return 'finished_reason="error",model_name="m"} 1.0' in text

    assert asyncio.run(run(is_alive=True))
    assert not asyncio.run(run(is_alive=False))


def test_an_engine_that_ends_between_two_scrapes_is_counted():
    class Engine(FakeEngine):
        """Another engine takes the place of this one after each request."""

        num_ended = 0

        @property
        def latest_stats(self):
            return SchedulerStats(engine_start_time=1.0 + self.num_ended, num_steps=10)

    async def run():
        engine, metrics = Engine(), ServerMetrics("m")
        generator = Generator(engine, metrics)
        for _ in range(2):
            async for _ in generator.generate(
                [_prompt(1)], SamplingParams(max_tokens=2), priority=0, stream=True
            ):
                pass
            engine.num_ended += 1
        text = metrics.render(engine.latest_stats, engine.token_totals).decode()
        assert 'paxkv:engine_restarts_total{engine="0",model_name="m"} 2.0' in text
        assert 'paxkv:steps_total{engine="0",model_name="m"} 30.0' in text

    asyncio.run(run())
