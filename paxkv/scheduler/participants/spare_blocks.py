"""SpareBlocks: blocks held by requests that do not run, which can be freed to make room."""

from paxkv.kv_cache.manager import KVCacheManager
from paxkv.scheduler.participants.forks import KeptRequests
from paxkv.scheduler.participants.remote_kv import RemoteKV
from paxkv.scheduler.request import Request, RequestStatus
from paxkv.scheduler.request_queue import RequestQueue


class SpareBlocks:
    """Blocks that finished requests keep for forks, and blocks loaded for waiting requests."""

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        kept_requests: KeptRequests,
        waiting: RequestQueue,
        remote_kv: RemoteKV | None,
    ) -> None:
        self._manager = kv_cache_manager
        self._kept_requests = kept_requests
        self._waiting = waiting
        self._remote_kv = remote_kv

    def release_kept(self, request_id: str) -> None:
        """Frees the blocks of a kept request. Other ids are ignored."""
        request = self._kept_requests.pop(request_id)
        if request is not None:
            self._manager.free(request)

    def release_oldest_kept(self) -> bool:
        """Frees a spare slot of states, or else the blocks of the oldest kept request.

        Returns False if there is neither.
        """
        if self._manager.free_spare_slot():
            return True
        request = self._kept_requests.pop_oldest()
        if request is None:
            return False
        self._manager.free(request)
        return True

    def loaded_requests(self) -> list[Request]:
        """Waiting requests that hold loaded blocks, in the order of the queue."""
        return [request for request in self._waiting if self._is_loaded(request)]

    def drop_loaded(self, request: Request) -> None:
        """Frees a waiting request's loaded blocks. The request starts again when it is admitted."""
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            self._remote_kv.discard_loaded(request)
            has_run = request.num_preemptions > 0
            request.status = RequestStatus.PREEMPTED if has_run else RequestStatus.WAITING
        self._manager.free(request)
        request.num_computed_tokens = 0

    def _is_loaded(self, request: Request) -> bool:
        # The status changes only when the scan of the queue reaches the request. It may never reach
        # it if the loaded blocks leave no room for the request at the front.
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            return self._remote_kv is not None and self._remote_kv.has_loaded(request)
        return request.num_computed_tokens > 0

    def drop_last_loaded(self, spared: Request) -> bool:
        """Frees the loaded blocks of the last such request in the queue, except `spared`.

        Returns False if there is no such request.
        """
        loaded = [request for request in self.loaded_requests() if request is not spared]
        if not loaded:
            return False
        self.drop_loaded(loaded[-1])
        return True
