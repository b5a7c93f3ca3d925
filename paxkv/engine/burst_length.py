"""`BurstLength`: how many decode steps the engine lets the device compute without the host."""

import math

# A stream's reader waits for the burst that runs, which takes no longer than this, however fast
# steps would be in bursts. So does a prompt that arrives. Guesses at what people feel.
MAX_BURST_S = 0.2
MAX_STREAMED_BURST_S = 0.05
# Weight of the newest step in the average: steps grow with their contexts, but slowly.
_NEWEST_WEIGHT = 0.25


class BurstLength:
    """Grows while no request arrives, within a time that is short for whoever waits.

    Bursts save the host's work between steps. After an arrival the next step is a single one, since
    more requests often follow; each quiet step doubles what is allowed.

    Args:
        max_decode_burst: Never more steps than this.
    """

    def __init__(self, max_decode_burst: int) -> None:
        self._max_decode_burst = max_decode_burst
        self._num_steps = 1
        self._step_s: float | None = None
        self._newest_step_s = 0.0

    def note_arrival(self) -> None:
        """A request came."""
        self._num_steps = 1

    def note_burst(self, num_decode_steps: int, took_s: float) -> None:
        """A burst of this many steps, one or more, took so long."""
        newest_s = self._newest_step_s = took_s / num_decode_steps
        if self._step_s is None:
            self._step_s = newest_s
        self._step_s += _NEWEST_WEIGHT * (newest_s - self._step_s)

    def expected_s(self, num_decode_steps: int) -> float:
        """Seconds that a burst of this many steps takes at least, so far as is known; 0 if nothing.

        When most requests end, steps become faster at once, and the average does so late.
        """
        return num_decode_steps * min(self._step_s or 0.0, self._newest_step_s)

    def next_length(self, *, is_streamed: bool) -> int:
        """Most steps of the burst that is decided now.

        Args:
            is_streamed: Whether somebody reads tokens as they come.
        """
        num_steps = self._num_steps
        self._num_steps = min(2 * num_steps, self._max_decode_burst)
        if self._step_s is None:
            return 1  # the first tells how long a step is
        max_burst_s = MAX_STREAMED_BURST_S if is_streamed else MAX_BURST_S
        num_in_time = max_burst_s / max(self._step_s, 1e-6)
        return max(1, min(num_steps, math.floor(num_in_time)))
