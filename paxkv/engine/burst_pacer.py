"""`BurstPacer`: decides the length of the next burst, and when the engine decides it."""

import time
from collections.abc import Callable

from paxkv.engine.burst_length import BurstLength
from paxkv.engine.step_in_flight import StepInFlight

# Share of a burst's expected duration after which the engine decides the next burst. The rest is
# for the engine's own work, and for a burst that is faster than the bursts before it.
_AWAITED_SHARE = 0.7
# The engine does not wait during shorter bursts, because they delay a new request only a little.
_MIN_AWAITED_S = 0.01
# The engine reserves this multiple of the last decision's duration. If it decided too late, the
# device would idle, its bursts would seem longer, and the engine would wait even longer.
_DECIDING_MARGIN = 2.0
# While it waits, the engine checks about once per decode step whether the burst has ended early, as
# it does when all requests end. More checks would cost time, because the engine wakes with cold
# caches on a processor that also computes the burst.
_MIN_CHECK_S = 0.005
# The longest time that the engine waits before it checks whether it must end.
_MAX_CHECK_S = 0.1
# ZeroMQ waits whole milliseconds, so a shorter wait would return immediately, again and again.
_MIN_SPARE_S = 0.001


class BurstPacer:
    """Measures decode steps, and derives from them the length and the timing of bursts.

    Args:
        max_decode_burst: Largest number of decode steps in a burst.
    """

    def __init__(self, max_decode_burst: int) -> None:
        self._max_decode_burst = max_decode_burst
        self._burst_length = BurstLength(max_decode_burst)
        self._last_fetch_s = 0.0
        self._last_deciding_s = 0.0

    def record_arrival(self) -> None:
        """Records that a request was added."""
        self._burst_length.record_arrival()

    def record_decision(self, start_s: float) -> None:
        """Records that a step, which the engine began to decide at `start_s`, is on the device."""
        self._last_deciding_s = time.perf_counter() - start_s

    def record_fetch(self, step: StepInFlight) -> None:
        """Records that the tokens of a step were fetched just now."""
        now_s = time.perf_counter()
        if step.is_burst:
            self._burst_length.record_burst(step.num_decode_steps, now_s - self._began_s(step))
        self._last_fetch_s = now_s

    def next_length(self, is_streamed: Callable[[], bool]) -> int:
        """Returns the largest number of decode steps that the next burst may have.

        Args:
            is_streamed: Returns whether a client reads tokens as they are sampled. Called only if
                bursts are allowed.
        """
        if self._max_decode_burst == 1:
            return 1
        return self._burst_length.next_length(is_streamed=is_streamed())

    def spare_s(self, step: StepInFlight) -> float:
        """Returns the seconds that the engine can wait before it decides the next step.

        A request that arrives in this time gets into the step after the running one, instead of
        waiting for one more burst. After the wait, the engine calls this method again.

        Args:
            step: The only step that the device computes.
        """
        if not step.is_burst:
            return 0.0
        expected_s = self._burst_length.expected_s(step.num_decode_steps)
        if expected_s < _MIN_AWAITED_S:
            return 0.0
        awaited_s = min(
            _AWAITED_SHARE * expected_s, expected_s - _DECIDING_MARGIN * self._last_deciding_s
        )
        spare_s = self._began_s(step) + awaited_s - time.perf_counter()
        if spare_s < _MIN_SPARE_S or step.handle.is_done:
            return 0.0
        check_s = max(expected_s / step.num_decode_steps, _MIN_CHECK_S)
        return min(spare_s, check_s, _MAX_CHECK_S)

    def _began_s(self, step: StepInFlight) -> float:
        """Returns when the device began a step: at its start, or after the step before it."""
        return max(step.start_s, self._last_fetch_s)
