"""An engine for tests: its tokens count up, and its settings make it slow or wrong."""

import os
import time

from benchmarks.engine.offline_engine import EngineOutput, EngineSpec
from benchmarks.workloads import Workload


def load_engine(spec: EngineSpec, workload: Workload) -> "CountingEngine":
    print("loading: this line is no answer")
    if spec.settings.get("dies"):
        raise MemoryError("no room for the model")
    return CountingEngine()


class CountingEngine:
    def prepare(self) -> None:
        time.sleep(0.5)

    def run(self, workload: Workload, **settings: object) -> EngineOutput:
        print("running: this line is no answer")
        if settings.get("fails"):
            raise RuntimeError("cannot do this here")
        stop = time.process_time() + float(settings.get("cpu_s", 0))
        while time.process_time() < stop:
            pass
        time.sleep(float(settings.get("sleep_s", 0)))
        num_missing = bool(settings.get("lacks_one"))
        threads = int(os.environ["OMP_NUM_THREADS"])
        return EngineOutput(
            token_ids=[list(range(r.num_output_tokens - num_missing)) for r in workload.requests],
            figures={"processors": len(os.sched_getaffinity(0)), "omp_threads": threads},
        )

    def logit_gap(self, token_ids: list[int], first: int, second: int) -> float:
        return float(sum(token_ids) + 10 * first + second)

    def close(self) -> None:
        pass
