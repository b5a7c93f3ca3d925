"""Counters of the prefix cache since the engine's start."""

import dataclasses


@dataclasses.dataclass(slots=True)
class PrefixCacheStats:
    """Tokens looked up at admission and found; requests that resume count apart.

    A request that resumes mostly finds its own blocks again, which says nothing about how much
    its prompt had in common with others.
    """

    num_requests: int = 0
    num_queries: int = 0
    num_hits: int = 0
    num_preempted_requests: int = 0
    num_preempted_queries: int = 0
    num_preempted_hits: int = 0

    def record(self, *, num_tokens: int, num_hits: int, is_resumed: bool) -> None:
        """Counts one admitted request."""
        if is_resumed:
            self.num_preempted_requests += 1
            self.num_preempted_queries += num_tokens
            self.num_preempted_hits += num_hits
        else:
            self.num_requests += 1
            self.num_queries += num_tokens
            self.num_hits += num_hits
