"""Engine processes for tests."""

import contextlib
from pathlib import Path
from typing import ClassVar

from benchmarks.engine.offline_engine import EngineRun, EngineSpec
from benchmarks.workloads import Workload


class FakeProcess(contextlib.AbstractContextManager):
    """Every token is 1, except the second of the third request of engines in `WRONG`.

    A run takes 2 s of CPU time, or as long as `CPU_S` or the engine's only setting says.
    """

    WRONG: ClassVar[dict[str, int]] = {}
    CPU_S: ClassVar[dict[str, float]] = {}

    def __init__(self, spec: EngineSpec, workload_file: Path, log_file: Path) -> None:
        self._workload = Workload.read(workload_file)
        self._name = log_file.stem

    def run(self, settings: dict[str, int], *, is_warm_up: bool = False) -> EngineRun:
        token_ids = [[1] * r.num_output_tokens for r in self._workload.requests]
        token_ids[2][1] = self.WRONG.get(self._name, 1)
        cpu_s = next(iter(settings.values()), self.CPU_S.get(self._name, 2.0))
        idle_cpu_s = 0.5 if self._name == "on" else 0.1
        times = {"wall_s": 1.0, "cpu_s": cpu_s, "idle_wall_s": 10.0, "idle_cpu_s": idle_cpu_s}
        return EngineRun(token_ids=token_ids, figures={"steps": 3.0}, **times)

    def logit_gap(self, token_ids: list[int], first: int, second: int) -> float:
        assert token_ids == [*self._workload.requests[2].prompt_token_ids, 1]
        return 0.5 if (first, second) == (1, 7) else -0.5

    def __exit__(self, *exc_info: object) -> None:
        pass
