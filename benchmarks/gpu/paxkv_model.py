"""Measures paxkv's engine with a model whose random weights are drawn on the device."""

import tempfile
from pathlib import Path

from benchmarks.gpu.device_engine import DeviceEngine
from benchmarks.gpu.subject import EngineStep, Subject, write_config
from benchmarks.units.unit import Measured
from benchmarks.workloads import Workload
from models import load_model

_WEIGHT_SEED = 0


class PaxkvModel(Subject):
    def __init__(self, model: str, is_rehearsal: bool) -> None:
        super().__init__(is_rehearsal=is_rehearsal)
        dtype = "float32" if is_rehearsal else "bfloat16"
        with tempfile.TemporaryDirectory(prefix="paxkv-benchmark-") as folder:
            write_config(Path(folder), model, is_rehearsal=is_rehearsal)
            loaded = load_model(folder, dtype=dtype, load_format="dummy", seed=_WEIGHT_SEED)
        self.vocab_size = loaded.config.vocab_size
        self._engine = DeviceEngine(loaded, self.sizes)

    def throughput(self, seed: int) -> Measured:
        """Measures tokens per second with requests of many lengths that arrive at once."""
        workload = self.throughput_workload(seed)
        # The first of the three runs compiles, and is not counted.
        seconds = [self.run(workload)[-1].end_s for _ in range(3)][1:]
        return Measured(figures={"tokens_per_s": [workload.num_output_tokens / s for s in seconds]})

    def run(self, workload: Workload) -> list[EngineStep]:
        return self._engine.run(workload).steps
