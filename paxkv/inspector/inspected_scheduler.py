"""`InspectedScheduler`: the state of a scheduler that the inspector reads."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.kv_cache.manager import KVCacheManager
from paxkv.scheduler.draft_counts import DraftCounts
from paxkv.scheduler.request import Request
from paxkv.scheduler.request_queue import RequestQueue


class InspectedScheduler(Protocol):
    """A scheduler with its requests, queues and blocks; the inspector only reads them."""

    @property
    def requests(self) -> Mapping[str, Request]:
        """Unfinished requests by id; each is in `running` or in `waiting`."""
        ...

    @property
    def running(self) -> Sequence[Request]: ...

    @property
    def waiting(self) -> RequestQueue: ...

    @property
    def kv_cache_manager(self) -> KVCacheManager: ...

    @property
    def scheduler_config(self) -> SchedulerConfig: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens of all steps scheduled so far."""
        ...

    @property
    def num_preemptions(self) -> int: ...

    @property
    def draft_counts(self) -> DraftCounts: ...
