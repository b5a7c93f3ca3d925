"""RemoteKV: the scheduler's notes on what a KV connector loads and saves."""

from paxkv.contracts.protocols import KVConnector
from paxkv.contracts.scheduler_output import KVConnectorMetadata, KVConnectorOutput
from paxkv.errors import InvariantError
from paxkv.kv_cache.manager import KVCacheManager
from paxkv.scheduler.participants.invalid_blocks import can_go_on_from
from paxkv.scheduler.request import Request


class RemoteKV:
    """Requests whose blocks a transfer still reads or writes, and the connector itself.

    Source: the connector's parts of vLLM `v1/core/sched/scheduler.py`.
    """

    def __init__(self, connector: KVConnector, kv_cache_manager: KVCacheManager) -> None:
        self._connector = connector
        self._manager = kv_cache_manager
        # Request id -> tokens that it has once its load is done; less where blocks failed.
        self._loading: dict[str, int] = {}
        self._loaded: set[str] = set()
        self._failed: set[str] = set()
        self._saving: set[str] = set()
        # Ended requests whose blocks a transfer still uses.
        self.delayed: dict[str, Request] = {}

    def match(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded, None if not known yet, and whether other steps run meanwhile.

        The last token is left to be computed here: its logits give the next one.
        """
        num_tokens, is_async = self._connector.get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        if num_tokens is None or num_tokens == 0:
            return num_tokens, False
        # Also one that is loaded beside other steps: for a window or a state it matters which
        # token is computed first, and for the last one alone there is no load to wait for.
        num_tokens = min(num_tokens, request.num_tokens - 1 - num_computed_tokens)
        return max(num_tokens, 0), is_async and num_tokens > 0

    def note_allocated(self, request: Request, num_external_tokens: int) -> None:
        """The request holds the blocks that the connector is to load into."""
        self._connector.update_state_after_alloc(
            request, self._manager.get_block_ids(request.request_id), num_external_tokens
        )

    def start_loading(self, request: Request, num_tokens: int) -> None:
        """A load beside other steps begins, after which `num_tokens` tokens are computed."""
        self._loading[request.request_id] = num_tokens

    def finish_loading(self, request: Request) -> bool:
        """Whether the load is done; then the request has the tokens, and others may hit them.

        Where blocks failed it has those before them, or gives all up.
        """
        req_id = request.request_id
        if req_id not in self._loaded:
            return False
        self._loaded.discard(req_id)
        num_tokens = self._loading.pop(req_id)
        has_failed = req_id in self._failed
        self._failed.discard(req_id)
        if has_failed and not can_go_on_from(self._manager, request, num_tokens):
            self._manager.free(request)
            return True
        request.num_computed_tokens = num_tokens
        self._manager.cache_blocks(request, num_tokens)
        return True

    def has_loaded(self, request: Request) -> bool:
        """Whether its load has ended, though `finish_loading` has not been asked since."""
        return request.request_id in self._loaded

    def forget_loaded(self, request: Request) -> None:
        """What was loaded for the request is given up; its blocks are the caller's to free."""
        self._loaded.discard(request.request_id)
        self._failed.discard(request.request_id)
        del self._loading[request.request_id]

    def build_metadata(
        self, num_scheduled_tokens: dict[str, int], requests: dict[str, Request]
    ) -> KVConnectorMetadata:
        """The step's transfers; no request has advanced yet."""
        return self._connector.build_connector_meta(
            {
                req_id: requests[req_id].num_computed_tokens + num_tokens
                for req_id, num_tokens in num_scheduled_tokens.items()
            }
        )

    def must_delay_free(self, request: Request) -> bool:
        """Tells the connector that a request ended; True if a transfer still uses its blocks."""
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
        """Takes note of finished transfers, and frees the blocks that waited for them.

        Raises:
            InvariantError: A transfer ended that was never begun.
        """
        # Sorted: the order of freeing decides what is evicted first, and must not be chance.
        for req_id in sorted(output.finished_recving):
            if req_id not in self._loading:
                raise InvariantError(f"a load ended for {req_id=}, which loads nothing.")
            if req_id in self.delayed:
                del self._loading[req_id]
            else:
                self._loaded.add(req_id)
        for req_id in sorted(output.finished_sending):
            if req_id not in self._saving:
                raise InvariantError(f"a save ended for {req_id=}, whose blocks were not kept.")
            self._saving.discard(req_id)
        for req_id in [r for r in self.delayed if r not in self._loading and r not in self._saving]:
            self._manager.free(self.delayed.pop(req_id))

    def note_invalid(self, request: Request, num_valid_tokens: int) -> None:
        """Blocks past the first `num_valid_tokens` tokens could not be loaded."""
        num_tokens = self._loading[request.request_id]
        self._loading[request.request_id] = min(num_tokens, num_valid_tokens)
        self._failed.add(request.request_id)

    def has_transfers(self) -> bool:
        """Whether a transfer is under way, also one whose end no step has seen yet."""
        return bool(self._loading or self._saving)
