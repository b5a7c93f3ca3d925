"""`StepInFlight`: a step that was given to the executor and whose tokens have not been fetched."""

import dataclasses

from paxkv.contracts.executor import StepHandle
from paxkv.contracts.scheduler_output import SchedulerOutput


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepInFlight:
    """A decision of the scheduler, and the handle to its results.

    Args:
        start_s: `time.perf_counter()` before the scheduler decided the step.
    """

    scheduler_output: SchedulerOutput
    handle: StepHandle
    start_s: float

    @property
    def num_scheduled_tokens(self) -> int:
        return self.scheduler_output.total_num_scheduled_tokens

    @property
    def num_decode_steps(self) -> int:
        return self.scheduler_output.num_decode_steps

    @property
    def is_burst(self) -> bool:
        """True if every request decodes, so the duration is a valid estimate of decode steps."""
        num_reqs = len(self.scheduler_output.num_scheduled_tokens)
        return self.num_decode_steps > 1 or 0 < self.num_scheduled_tokens == num_reqs
