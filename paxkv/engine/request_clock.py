"""When requests came, were first computed, and had their first token: what their waits were."""

import time
from collections.abc import Iterable

from paxkv.contracts.engine_output import EngineCoreOutput, RequestTimes


class RequestClock:
    """Follows each request up to its first token, and costs nothing after that.

    Kept beside the scheduler and not in it: nothing there may look at a clock.
    """

    def __init__(self) -> None:
        # Request id -> when it came, and when its first step was started.
        self._added_s: dict[str, float] = {}
        self._scheduled_s: dict[str, float] = {}

    def note_added(self, request_id: str) -> None:
        """Begins to follow a request."""
        self._added_s[request_id] = time.perf_counter()

    def note_scheduled(self, request_ids: Iterable[str]) -> None:
        """Notes who is in a step for the first time."""
        now_s = time.perf_counter()
        for request_id in request_ids:
            self._scheduled_s.setdefault(request_id, now_s)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Follows requests no more that were given up."""
        for request_id in request_ids:
            self._added_s.pop(request_id, None)
            self._scheduled_s.pop(request_id, None)

    def take_first_tokens(self, outputs: Iterable[EngineCoreOutput]) -> dict[str, RequestTimes]:
        """The times of those who have their first token now; none of them is followed further."""
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
            # Without a token it was refused, or ended before it ran.
            if scheduled_s is not None and output.new_token_ids:
                times[request_id] = RequestTimes(
                    queue_s=scheduled_s - added_s, prefill_s=now_s - scheduled_s
                )
        return times
