"""What an engine offers to be measured offline, and what is told of a run."""

import dataclasses
from collections.abc import Mapping
from typing import Protocol

from benchmarks.workloads import Workload

# Values that JSON and a command line can carry.
Setting = int | float | bool | str | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """How to start an engine.

    Args:
        module: Name of a module with `load_engine(spec, workload) -> OfflineEngine`.
        checkpoint: Folder in Hugging Face layout.
        num_threads: Processors that the engine may use; it is pinned to as many.
        settings: The engine's own, for its whole life.
    """

    module: str
    checkpoint: str
    dtype: str
    num_threads: int
    settings: Mapping[str, Setting]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutput:
    """What an engine made of a workload.

    Args:
        token_ids: New tokens of each request, as many as it wanted, in the order of the workload.
        figures: What the engine counted, by name with the unit, such as `preemptions`.
    """

    token_ids: list[list[int]]
    figures: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """One timed run of a workload, as the engine's process tells it.

    Args:
        cpu_s: Of all threads of the engine's process, during the run.
        idle_cpu_s: What it burned between its last run and this one, in `idle_wall_s`.
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
        """Forgets what the last run left, such as cached prefixes; not timed."""
        ...

    def run(self, workload: Workload, **settings: Setting) -> EngineOutput:
        """Computes all requests; timed as a whole.

        Args:
            settings: The engine's own, for this run alone, such as `batch_size`.
        """
        ...

    def logit_gap(self, token_ids: list[int], first: int, second: int) -> float:
        """Logit of `first` minus that of `second` after `token_ids`.

        Raises:
            NotImplementedError: The engine has no way to tell; those that judge differences have.
        """
        ...

    def close(self) -> None: ...
