"""`BurstLength`: the number of decode steps that the device computes without the host."""

import math

# Longest durations of a burst. A new request, and the reader of a stream, wait for the running
# burst. The numbers are guesses at the delay that people notice.
MAX_BURST_S = 0.2
MAX_STREAMED_BURST_S = 0.05
# Weight of the newest step in the average. Steps get longer only slowly, as contexts grow.
_NEWEST_WEIGHT = 0.25


class BurstLength:
    """Chooses a length that grows while no request arrives, up to a limit on the duration.

    Bursts save the host's work between steps. After a request arrives, the next burst has one step,
    because more requests often follow. Each burst without an arrival doubles the allowed length.

    Args:
        max_decode_burst: Largest number of steps in a burst.
    """

    def __init__(self, max_decode_burst: int) -> None:
        self._max_decode_burst = max_decode_burst
        self._num_steps = 1
        self._step_s: float | None = None
        self._newest_step_s = 0.0

    def record_arrival(self) -> None:
        """Records that a request has arrived."""
        self._num_steps = 1

    def record_burst(self, num_decode_steps: int, took_s: float) -> None:
        """Records the duration of a burst of one or more decode steps."""
        newest_s = self._newest_step_s = took_s / num_decode_steps
        if self._step_s is None:
            self._step_s = newest_s
        self._step_s += _NEWEST_WEIGHT * (newest_s - self._step_s)

    def expected_s(self, num_decode_steps: int) -> float:
        """Returns a low estimate of a burst's duration; 0 before the first burst.

        When most requests end, steps become faster immediately, but the average falls slowly. So
        the result uses the faster of the two.
        """
        return num_decode_steps * min(self._step_s or 0.0, self._newest_step_s)

    def next_length(self, *, is_streamed: bool) -> int:
        """Returns the largest number of steps that the next burst may have.

        Args:
            is_streamed: Whether a client reads tokens as they are sampled.
        """
        num_steps = self._num_steps
        self._num_steps = min(2 * num_steps, self._max_decode_burst)
        if self._step_s is None:
            return 1  # the duration of a step is not known yet
        max_burst_s = MAX_STREAMED_BURST_S if is_streamed else MAX_BURST_S
        num_in_time = max_burst_s / max(self._step_s, 1e-6)
        return max(1, min(num_steps, math.floor(num_in_time)))
