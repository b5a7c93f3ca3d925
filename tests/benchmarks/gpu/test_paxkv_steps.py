"""What is checked of outputs, and how steps are started and fetched."""

import pytest

from benchmarks.gpu.paxkv_steps import StepLoop, check_lengths
from benchmarks.gpu.plain_schedule import PlainSchedule, StepLimits
from benchmarks.workloads import Workload, WorkloadRequest
from paxkv.contracts.runner_output import ModelRunnerOutput

REQUEST = WorkloadRequest(prompt_token_ids=[1, 2], num_output_tokens=3)
LIMITS = StepLimits(block_size=4, num_blocks=9, max_num_seqs=2, max_num_batched_tokens=8)


class CountingRunner:
    """Gives every request as many tokens as it draws, and notes what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def execute_model(self, output):
        self.calls.append(f"start {output.total_num_scheduled_tokens}")
        return CountingStep(self, output)


class CountingStep:
    def __init__(self, runner, output) -> None:
        self._runner, self._output = runner, output

    def sample_tokens(self) -> ModelRunnerOutput:
        self._runner.calls.append("fetch")
        req_ids = list(self._output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=req_ids, sampled_token_ids=[[7]] * len(req_ids), logprobs=[None] * len(req_ids)
        )


def test_steps_are_fetched_in_their_order_and_the_end_is_told():
    runner = CountingRunner()
    workload = Workload(name="w", requests=[REQUEST])
    loop = StepLoop(runner, PlainSchedule(workload, LIMITS, name="a"))
    assert loop.start() and loop.start()
    assert loop.num_in_flight == 2
    loop.fetch()
    assert loop.start() and not loop.start()
    loop.end()
    assert runner.calls == [
        *("start 2", "start 1", "fetch", "start 1"),
        *("fetch", "fetch", "start 0", "fetch"),
    ]
    assert loop.token_ids == {"a.0": [7, 7, 7]}


def test_missing_tokens_are_an_error():
    workload = Workload(name="w", requests=[REQUEST, REQUEST])
    check_lengths(workload, [[1, 2, 3], [1, 2, 3]])
    with pytest.raises(ValueError, match=r"got \[2, 3\], wanted \[3, 3\]"):
        check_lengths(workload, [[1, 2, 3], [1, 2]])
