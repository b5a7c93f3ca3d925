"""An engine for tests: its tokens count up, and it does what its settings say."""

import os
import time

from benchmarks.engine.offline_engine import EngineOutput, EngineSpec
from benchmarks.workloads import Workload


def load_engine(spec: EngineSpec, workload: Workload) -> "CountingEngine":
    print("loading: this line is no answer")
    if spec.settings.get("dies"):
        raise MemoryError("no room for the model")
    if spec.settings.get("refuses"):
        raise ValueError("cannot have this here")
    return CountingEngine(len(workload.requests), float(spec.settings.get("prepare_s", 0)))


class CountingEngine:
    def __init__(self, num_requests: int, prepare_s: float) -> None:
        self._num_requests = num_requests
        self._prepare_s = prepare_s
        self._num_prepared = 0

    def prepare(self) -> None:
        self._num_prepared += 1
        time.sleep(self._prepare_s)

    def run(self, workload: Workload, **settings: object) -> EngineOutput:
        print("running: nor is this")
        if settings.get("fails"):
            raise RuntimeError("cannot do this here")
        stop = time.process_time() + float(settings.get("cpu_s", 0))
        while time.process_time() < stop:
            pass
        time.sleep(float(settings.get("sleep_s", 0)))
        return EngineOutput(
            token_ids=[
                list(range(r.num_output_tokens - bool(settings.get("lacks_one"))))
                for r in workload.requests
            ],
            figures={
                "processors": len(os.sched_getaffinity(0)),
                "requests": self._num_requests,
                "prepared": self._num_prepared,
                "omp_threads": int(os.environ["OMP_NUM_THREADS"]),
            },
        )

    def logit_gap(self, token_ids: list[int], first: int, second: int) -> float:
        return float(sum(token_ids) + 10 * first + second)

    def close(self) -> None:
        pass
