"""What is made of an engine's run."""

import pytest

from benchmarks.gpu.paxkv_engine import EngineRun, EngineStep, PaxkvEngine
from benchmarks.gpu.sizes import REHEARSAL
from paxkv.config.engine_config import SchedulerConfig


class RecordedEngine(PaxkvEngine):
    """Has run already."""

    def __init__(self, steps: list[EngineStep]) -> None:
        super().__init__(
            None,
            REHEARSAL,
            vocab_size=256,
            scheduler_config=SchedulerConfig(),
            max_model_len=REHEARSAL.max_model_len,
        )
        self._steps = steps

    def run(self, workload, *, enable_prefix_caching):
        assert len(workload.requests) == 2 and not enable_prefix_caching
        return EngineRun(
            wall_s=1.0, ttft_s=[0.1], steps=self._steps, num_output_tokens=0, token_ids=[]
        )


def step(end_s, waited_s, num_tokens, num_started=2, num_finished=0) -> EngineStep:
    return EngineStep(
        end_s=end_s,
        waited_s=waited_s,
        num_tokens=num_tokens,
        num_started=num_started,
        num_finished=num_finished,
    )


def test_steady_decode_leaves_prompts_and_ends_out():
    steps = [
        step(0.5, 0.4, 1, num_started=1),
        step(1.0, 0.9, 3),
        step(2.0, 1.8, 11),
        step(4.0, 3.4, 51),
        step(9.0, 3.5, 52, num_finished=1),
    ]
    # From the first step with both to the last before an end: 48 tokens of 2 requests in 3 s, of
    # which 2.5 s were waiting.
    assert RecordedEngine(steps).decode(num_reqs=2, seed=0) == {
        "step_ms": [125.0],
        "tokens_per_s": [16.0],
        "host_ms_per_step": [pytest.approx(500 / 24)],
    }


def test_too_few_steady_steps_are_an_error():
    with pytest.raises(ValueError, match="got 1 steps of steady decode"):
        RecordedEngine([step(1.0, 0.9, 3)]).decode(num_reqs=2, seed=0)
