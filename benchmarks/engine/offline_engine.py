"""The interface of engines that are measured offline, and the result of a run."""

import dataclasses
from collections.abc import Mapping
from typing import Protocol

from benchmarks.workloads import Workload

# Values that JSON and a command line can hold.
Setting = int | float | bool | str | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """How to start an engine.

    Args:
        module: Name of a module with `load_engine(spec, workload) -> OfflineEngine`.
        checkpoint: Folder in Hugging Face layout.
        num_threads: Processors that the engine is pinned to.
        settings: Settings of the engine for all runs.
    """

    module: str
    checkpoint: str
    dtype: str
    num_threads: int
    settings: Mapping[str, Setting]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutput:
    """The output of an engine for a workload.

    Args:
        token_ids: All new tokens of each request, in the order of the workload.
        figures: Name with unit, such as `preemptions` -> what the engine counted.
    """

    token_ids: list[list[int]]
    figures: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """One timed run of a workload.

    Args:
        cpu_s: CPU time of all threads of the engine's process during the run.
        idle_cpu_s: CPU time between the previous run and this one, in `idle_wall_s`.
    """

    token_ids: list[list[int]]
    figures: dict[str, float]
    wall_s: float
    cpu_s: float
    idle_wall_s: float
    idle_cpu_s: float

    @property
    def num_output_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def tokens_per_s(self) -> float:
        return self.num_output_tokens / self.wall_s

    @property
    def tokens_per_cpu_s(self) -> float:
        return self.num_output_tokens / self.cpu_s


class OfflineEngine(Protocol):
    """A loaded engine."""

    def prepare(self) -> None:
        """Drops state of the previous run, such as cached prefixes; not timed."""
        ...

    def run(self, workload: Workload, **settings: Setting) -> EngineOutput:
        """Runs all requests.

        Args:
            settings: Settings of this run, such as `batch_size`.
        """
        ...

    def logit_gap(self, token_ids: list[int], first: int, second: int) -> float:
        """Logit of `first` minus that of `second` after `token_ids`.

        Raises:
            NotImplementedError: The engine cannot compute it.
        """
        ...

    def close(self) -> None: ...
