"""`RequestClock`: measures how long requests wait in the queue and for their first token."""

import time
from collections.abc import Iterable

from paxkv.contracts.engine_output import EngineCoreOutput, RequestTimes


class RequestClock:
    """Measures each request until its first token.

    It is not part of the scheduler, because the scheduler must not read a clock.
    """

    def __init__(self) -> None:
        # Request id -> time of its arrival, and of the start of its first step.
        self._added_s: dict[str, float] = {}
        self._scheduled_s: dict[str, float] = {}

    def record_added(self, request_id: str) -> None:
        """Records that a request has arrived."""
        self._added_s[request_id] = time.perf_counter()

    def record_scheduled(self, request_ids: Iterable[str]) -> None:
        """Records that requests are in a step. Only the first step of a request counts."""
        now_s = time.perf_counter()
        for request_id in request_ids:
            self._scheduled_s.setdefault(request_id, now_s)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Forgets requests that were aborted."""
        for request_id in request_ids:
            self._added_s.pop(request_id, None)
            self._scheduled_s.pop(request_id, None)

    def pop_first_token_times(self, outputs: Iterable[EngineCoreOutput]) -> dict[str, RequestTimes]:
        """Returns the times of requests with their first token in `outputs`, and forgets them."""
        if not self._added_s:
            return {}
        now_s = time.perf_counter()
        times = {}
        for output in outputs:
            request_id = output.request_id
            added_s = self._added_s.pop(request_id, None)
            if added_s is None:
                continue
            scheduled_s = self._scheduled_s.pop(request_id, None)
            # A request without a token was refused, or ended before its first step.
            if scheduled_s is not None and output.new_token_ids:
                times[request_id] = RequestTimes(
                    queue_s=scheduled_s - added_s, prefill_s=now_s - scheduled_s
                )
        return times
