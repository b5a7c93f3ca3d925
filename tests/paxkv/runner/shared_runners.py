"""The configurations of `ModelRunner` that the tests of the runner share.

Each configuration compiles eight programs, which costs more than what the tests then compute. The
fixtures in `conftest.py` warm up each configuration once per worker, and only the first worker of
a test run compiles its programs.
"""

import contextlib
import dataclasses
import fcntl
from collections.abc import Iterator
from pathlib import Path

from models import LoadedModel
from models.loading.loaded_draft_model import LoadedDrafter
from paxkv.config.engine_config import CacheConfig, RunnerConfig, SchedulerConfig
from paxkv.runner.memory.memory_plan import HostMemory
from paxkv.runner.model_runner import ModelRunner
from paxkv.runner.programs.program_store import ProgramCache, ProgramStore
from paxkv.runner.ranks.rank_group import RankGroup
from tests.paxkv.runner.tiny_model import TinyModel

MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, MAX_MODEL_LEN = 3, 14, 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmRunner:
    """A runner after its warm-up. A test adds requests and must finish them all.

    Attributes:
        model: The runner's model, which also computes the expected logits.
    """

    runner: ModelRunner
    model: TinyModel | LoadedModel


def make_runner(
    model: TinyModel | LoadedModel,
    cache_config: CacheConfig | None = None,
    *,
    runner_config: RunnerConfig | None = None,
    store: ProgramStore | None = None,
    host_memory: HostMemory | None = None,
    head: LoadedDrafter | None = None,
    group: RankGroup | None = None,
) -> ModelRunner:
    """A runner with the limits above, before its warm-up."""
    return ModelRunner(
        model,
        cache_config=cache_config or CacheConfig(block_size=8, num_gpu_blocks_override=40),
        scheduler_config=SchedulerConfig(
            max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS
        ),
        max_model_len=MAX_MODEL_LEN,
        seed=0,
        runner_config=runner_config or RunnerConfig(),
        program_store=store,
        host_memory=host_memory,
        head=head,
        group=group,
    )


def make_warm_runner(
    folder: Path,
    model: TinyModel | LoadedModel,
    runner_config: RunnerConfig | None = None,
    *,
    head: LoadedDrafter | None = None,
) -> WarmRunner:
    """A warm runner whose programs are loaded from `folder`, or compiled and kept there."""
    folder.mkdir(exist_ok=True, mode=0o700)
    with _locked(folder / "lock"):
        store = ProgramCache(folder / "programs")
        runner = make_runner(model, runner_config=runner_config, store=store, head=head)
        runner.warm_up()
    return WarmRunner(runner=runner, model=model)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Waits until no other process holds the lock."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
