"""RemoteKV: the scheduler's record of the loads and saves of a KV connector."""

from paxkv.contracts.protocols import KVConnector
from paxkv.contracts.scheduler_output import KVConnectorMetadata, KVConnectorOutput
from paxkv.errors import InvariantError
from paxkv.kv_cache.manager import KVCacheManager
from paxkv.scheduler.participants.invalid_blocks import can_continue_from
from paxkv.scheduler.request import Request


class RemoteKV:
    """Calls the connector, and tracks requests whose blocks a transfer reads or writes.

    Source: the connector's parts of vLLM `v1/core/sched/scheduler.py`.
    """

    def __init__(self, connector: KVConnector, kv_cache_manager: KVCacheManager) -> None:
        self._connector = connector
        self._manager = kv_cache_manager
        # Request id -> number of computed tokens after its load; fewer if blocks failed to load.
        self._loading: dict[str, int] = {}
        self._loaded: set[str] = set()
        self._failed: set[str] = set()
        self._saving: set[str] = set()
        # Ended requests whose blocks a transfer still uses.
        self.delayed: dict[str, Request] = {}

    def match(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Number of tokens that can be loaded, and whether other steps run during the load.

        The number is None if the connector does not know it yet. It excludes the last token, which
        must be computed because its logits give the next token.
        """
        num_tokens, is_async = self._connector.get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        if num_tokens is None or num_tokens == 0:
            return num_tokens, False
        # The last token is excluded for asynchronous loads too: windows and states depend on which
        # token is computed first. If only the last token could be loaded, there is no load.
        num_tokens = min(num_tokens, request.num_tokens - 1 - num_computed_tokens)
        return max(num_tokens, 0), is_async and num_tokens > 0

    def record_allocated(self, request: Request, num_external_tokens: int) -> None:
        """Reports to the connector that the request holds the blocks to load into."""
        self._connector.update_state_after_alloc(
            request, self._manager.get_block_ids(request.request_id), num_external_tokens
        )

    def start_loading(self, request: Request, num_tokens: int) -> None:
        """Records an asynchronous load, after which `num_tokens` tokens are computed."""
        self._loading[request.request_id] = num_tokens

    def finish_loading(self, request: Request) -> bool:
        """Returns False if the load is still in progress. Otherwise completes it.

        The loaded tokens count as computed, and their blocks enter the prefix cache. If blocks
        failed to load, only the tokens before them count, or all blocks of the request are freed.
        """
        req_id = request.request_id
        if req_id not in self._loaded:
            return False
        self._loaded.discard(req_id)
        num_tokens = self._loading.pop(req_id)
        has_failed = req_id in self._failed
        self._failed.discard(req_id)
        if has_failed and not can_continue_from(self._manager, request, num_tokens):
            self._manager.free(request)
            return True
        request.num_computed_tokens = num_tokens
        self._manager.cache_blocks(request, num_tokens)
        return True

    def has_loaded(self, request: Request) -> bool:
        """Whether the request's load has ended and `finish_loading` has not completed it yet."""
        return request.request_id in self._loaded

    def discard_loaded(self, request: Request) -> None:
        """Discards a load that has ended. The caller frees the request's blocks."""
        self._loaded.discard(request.request_id)
        self._failed.discard(request.request_id)
        del self._loading[request.request_id]

    def build_metadata(
        self, num_scheduled_tokens: dict[str, int], requests: dict[str, Request]
    ) -> KVConnectorMetadata:
        """Builds the step's transfers. Must run before any request advances."""
        return self._connector.build_connector_meta(
            {
                req_id: requests[req_id].num_computed_tokens + num_tokens
                for req_id, num_tokens in num_scheduled_tokens.items()
            }
        )

    def must_delay_free(self, request: Request) -> bool:
        """Reports a request's end to the connector; True if a transfer still uses its blocks."""
        req_id = request.request_id
        if self._connector.request_finished(request, self._manager.get_block_ids(req_id)):
            self._saving.add(req_id)
        is_loading = self._loading.pop(req_id, None) is not None and req_id not in self._loaded
        self._loaded.discard(req_id)
        self._failed.discard(req_id)
        if not is_loading and req_id not in self._saving:
            return False
        self.delayed[req_id] = request
        if is_loading:
            self._loading[req_id] = 0
        return True

    def update(self, output: KVConnectorOutput) -> None:
        """Records finished transfers, and frees blocks of finished requests that they used.

        Raises:
            InvariantError: A finished transfer was never started.
        """
        # Sorted, because the order of freeing decides which blocks are evicted first, and it must
        # not depend on the order of a set.
        for req_id in sorted(output.finished_recving):
            if req_id not in self._loading:
                raise InvariantError(f"a load ended for {req_id=}, which has no load in progress.")
            if req_id in self.delayed:
                del self._loading[req_id]
            else:
                self._loaded.add(req_id)
        for req_id in sorted(output.finished_sending):
            if req_id not in self._saving:
                raise InvariantError(f"a save ended for {req_id=}, which has no save in progress.")
            self._saving.discard(req_id)
        for req_id in [r for r in self.delayed if r not in self._loading and r not in self._saving]:
            self._manager.free(self.delayed.pop(req_id))

    def record_invalid(self, request: Request, num_valid_tokens: int) -> None:
        """Records that blocks after the first `num_valid_tokens` tokens could not be loaded."""
        num_tokens = self._loading[request.request_id]
        self._loading[request.request_id] = min(num_tokens, num_valid_tokens)
        self._failed.add(request.request_id)

    def has_transfers(self) -> bool:
        """Whether there is a transfer in progress, or an ended load not completed yet."""
        return bool(self._loading or self._saving)
