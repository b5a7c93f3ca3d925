"""The configurations of `ModelRunner` that the tests of the runner share.

Each configuration compiles up to seven programs, which costs more than what the tests then compute.
Warm runners of all test files share one folder of programs: what one of them has compiled, a later
one with the same configuration loads, in every worker. Weights shape no program.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import pytest

from models import LoadedModel
from models.loading.loaded_draft_model import LoadedDrafter
from paxkv.config.cache_config import CacheConfig
from paxkv.config.runner_config import RunnerConfig
from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.runner.memory.memory_plan import HostMemory
from paxkv.runner.model_runner import ModelRunner
from paxkv.runner.programs.program_identity import identity_digest
from paxkv.runner.programs.program_store import ProgramCache, ProgramFolder, ProgramStore
from paxkv.runner.ranks.rank_group import RankGroup
from paxkv.runner.shapes import step_buckets
from paxkv.runner.shapes.program_shapes import ProgramShape
from tests.paxkv.runner import tiny_model
from tests.paxkv.runner.greedy_draws import greedy_draws
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
    model: TinyModel | LoadedModel,
    runner_config: RunnerConfig | None = None,
    *,
    head: LoadedDrafter | None = None,
    has_few_sizes: bool = False,
    draws_greedily: bool = False,
) -> WarmRunner:
    """A warm runner whose programs are loaded from the test run's folder, or compiled and kept.

    Args:
        has_few_sizes: There is one program of bursts, for `MAX_NUM_SEQS` requests.
        draws_greedily: The programs draw as `greedy_draws` does.
    """
    # `tests/conftest.py` sets the variable, and workers of pytest-xdist inherit it. Runs of mutants
    # share the folder too. The identity of programs covers the code of features, not `TinyModel`.
    cache, code = Path(os.environ["JAX_COMPILATION_CACHE_DIR"]), Path(tiny_model.__file__)
    kind = "greedy-runner" if draws_greedily else "runner"
    folder = cache / f"{kind}-programs-{hashlib.sha256(code.read_bytes()).hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.ExitStack() as locks, pytest.MonkeyPatch.context() as patch:
        if has_few_sizes:
            patch.setattr(step_buckets, "decode_buckets", lambda max_num_seqs: (max_num_seqs,))
        if draws_greedily:
            locks.enter_context(greedy_draws())
        store = SharedPrograms(folder, locks)
        runner = make_runner(model, runner_config=runner_config, store=store, head=head)
        runner.warm_up()
    return WarmRunner(runner=runner, model=model)


class SharedPrograms(ProgramCache):
    """Waits until no other process compiles the programs of the same identity.

    Args:
        locks: Holds the locks; closed after the warm-up.
    """

    def __init__(self, folder: Path, locks: contextlib.ExitStack) -> None:
        super().__init__(folder / "programs")
        self._folder = folder
        self._locks = locks
        self._locked: set[str] = set()

    def open(
        self,
        identity: Mapping[str, str],
        shapes: Sequence[ProgramShape],
        devices: Sequence[jax.Device],
    ) -> ProgramFolder | None:
        digest = identity_digest(identity)
        if digest not in self._locked:
            self._locked.add(digest)
            file = self._locks.enter_context((self._folder / f"{digest}.lock").open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        return super().open(identity, shapes, devices)
