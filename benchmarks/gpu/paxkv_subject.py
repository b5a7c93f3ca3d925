"""paxkv with one model and one choice of kernels, for all measurements of a process."""

import importlib
import logging
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.packages import ENGINE_PACKAGES, missing_packages, missing_text
from benchmarks.gpu.paxkv_steps import PaxkvSteps
from benchmarks.gpu.plain_schedule import StepLimits
from benchmarks.gpu.sizes import sizes_of, write_config
from benchmarks.ops.gpu_units import AbsentError
from models import LoadedModel, load_model
from paxkv.config.engine_config import CacheConfig, Kernels, RunnerConfig, SchedulerConfig
from paxkv.runner.memory.kv_cache_arrays import default_block_size
from paxkv.runner.model_runner import ModelRunner

SEED = 0


class PaxkvSubject:
    """A runner with random weights, whose programs are compiled when they are first needed.

    Args:
        kernels: As `--kernels` of the server.
    """

    def __init__(self, *, model: str, kernels: Kernels, is_rehearsal: bool) -> None:
        self._sizes = sizes_of(is_rehearsal=is_rehearsal)
        sizes = self._sizes
        self._complaints = _Complaints()
        logging.getLogger("paxkv").addHandler(self._complaints)
        start_s = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="paxkv-benchmark-") as name:
            write_config(Path(name), model, is_rehearsal=is_rehearsal)
            loaded = load_model(
                name,
                dtype="float32" if is_rehearsal else "bfloat16",
                load_format="dummy",
                seed=SEED,
            )
        self._model: LoadedModel = loaded
        platform = next(iter(loaded.params[0].devices())).platform
        block_size = sizes.block_size or default_block_size(platform)
        num_blocks = 1 + sizes.num_cache_tokens // block_size
        self._scheduler_config = SchedulerConfig(
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            max_decode_burst=sizes.max_decode_burst,
        )
        self._runner = ModelRunner(
            loaded,
            cache_config=CacheConfig(block_size=block_size, num_gpu_blocks_override=num_blocks),
            scheduler_config=self._scheduler_config,
            max_model_len=sizes.max_model_len,
            seed=SEED,
            runner_config=RunnerConfig(kernels=kernels),
        )
        limits = StepLimits(
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
        )
        self._steps = PaxkvSteps(self._runner, loaded, sizes, limits)
        self._load_s = time.perf_counter() - start_s

    def load(self) -> dict[str, Any]:
        """What came of making it: the constructor has done the work.

        Among it is the comparison of the device's own kernels with XLA's, after which XLA's may be
        taken instead; that is a note.
        """
        return {"figures": {"load_s": [self._load_s]}, "notes": self._complaints.texts}

    def decode(self, *, num_reqs: int, seed: int) -> dict[str, Any]:
        figures, reads = self._steps.decode(num_reqs=num_reqs, seed=seed)
        return {"figures": figures, "reads": reads}

    def first_token(self, *, prompt_len: int, seed: int) -> dict[str, Any]:
        return {"figures": self._steps.first_token(prompt_len=prompt_len, seed=seed)}

    def compile_throughput(self, *, seed: int) -> dict[str, Any]:
        return {"figures": self._steps.compile_throughput(seed=seed)}

    def throughput(self, *, seed: int) -> dict[str, Any]:
        return {"figures": self._steps.throughput(seed=seed)}

    def engine_throughput(self, *, seed: int) -> dict[str, Any]:
        return {"figures": self._engine().throughput(seed=seed)}

    def engine_prefix(self, *, seed: int) -> dict[str, Any]:
        return {"figures": self._engine().prefix(seed=seed)}

    def engine_decode(self, *, num_reqs: int, seed: int) -> dict[str, Any]:
        return {"figures": self._engine().decode(num_reqs=num_reqs, seed=seed)}

    def _engine(self) -> Any:
        missing = missing_packages(ENGINE_PACKAGES)
        if missing:
            raise AbsentError(missing_text("paxkv's engine", missing))
        # Late, because without those packages everything above still works.
        module = importlib.import_module("benchmarks.gpu.paxkv_engine")
        return module.PaxkvEngine(
            self._runner,
            self._sizes,
            vocab_size=self._model.config.vocab_size,
            scheduler_config=self._scheduler_config,
            max_model_len=self._sizes.max_model_len,
        )


class _Complaints(logging.Handler):
    """Keeps what paxkv logs as errors, such as kernels that it does not use."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
