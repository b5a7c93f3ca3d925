"""PrefixCacheStats: counts the tokens that were looked up in the prefix cache, and the hits."""

import dataclasses
from collections import deque

MAX_RECENT_REQUESTS = 1000


class CachingMetrics:
    """Queries and hits of the most recent requests.

    Args:
        max_recent_requests: Size of the window in requests, at least 1.

    Source: vLLM `v1/metrics/stats.py`. There the window consists of steps.
    """

    def __init__(self, max_recent_requests: int = MAX_RECENT_REQUESTS) -> None:
        self._recent: deque[tuple[int, int]] = deque()
        self._max_recent_requests = max_recent_requests
        self.num_queries = 0
        self.num_hits = 0

    def observe(self, num_queries: int, num_hits: int) -> None:
        """Adds one request, and drops the oldest if the window is full."""
        if len(self._recent) == self._max_recent_requests:
            old_queries, old_hits = self._recent.popleft()
            self.num_queries -= old_queries
            self.num_hits -= old_hits
        self._recent.append((num_queries, num_hits))
        self.num_queries += num_queries
        self.num_hits += num_hits

    def reset(self) -> None:
        self._recent.clear()
        self.num_queries = self.num_hits = 0


@dataclasses.dataclass(slots=True)
class PrefixCacheStats:
    """Tokens that requests looked up at admission (queries), and tokens found (hits).

    Requests that resume after a preemption are counted separately (`num_preempted_...`). They
    mostly find their own blocks, which says nothing about sharing between requests.

    Args:
        recent: Counts of the most recent requests, without resumed requests.
    """

    num_queries: int = 0
    num_hits: int = 0
    num_preempted_queries: int = 0
    num_preempted_hits: int = 0
    recent: CachingMetrics = dataclasses.field(default_factory=CachingMetrics)

    def record(self, *, num_tokens: int, num_hits: int, is_resumed: bool) -> None:
        """Counts one admitted request."""
        if is_resumed:
            self.num_preempted_queries += num_tokens
            self.num_preempted_hits += num_hits
        else:
            self.num_queries += num_tokens
            self.num_hits += num_hits
            self.recent.observe(num_tokens, num_hits)

    def on_reset(self) -> None:
        """Clears the recent counts, because the prefix cache was emptied."""
        self.recent.reset()
