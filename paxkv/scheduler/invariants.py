"""The rules that hold between two steps for requests and queues, as checks."""

from collections.abc import Iterable, Mapping

from paxkv.errors import InvariantError
from paxkv.kv_cache.manager import KVCacheManager
from paxkv.scheduler.request import Request, RequestStatus

_WAITING_STATUSES = (
    RequestStatus.WAITING,
    RequestStatus.WAITING_FOR_FSM,
    RequestStatus.WAITING_FOR_REMOTE_KVS,
    RequestStatus.WAITING_FOR_FORK,
    RequestStatus.PREEMPTED,
)
_LOADED_STATUSES = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def check_requests(
    requests: Mapping[str, Request],
    running: Iterable[Request],
    waiting: Iterable[Request],
    num_unknown_tokens: Mapping[str, int] | None = None,
    *,
    has_connector: bool = False,
) -> None:
    """Checks that each unfinished request is in one queue, in a status that fits it.

    Args:
        num_unknown_tokens: What steps in flight compute of drafts and, without placeholders, of
            tokens that they sample themselves.
        has_connector: Waiting requests may have tokens that were loaded for them.

    Raises:
        InvariantError: One is not.
    """
    queued = [*running, *waiting]
    if len(queued) != len(requests):
        raise InvariantError(f"{len(queued)} requests are queued, {len(requests)} are known.")
    for request in queued:
        if requests.get(request.request_id) is not request:
            raise InvariantError(f"{request!r} is queued but not known.")
    unknown = num_unknown_tokens or {}
    for request in running:
        if request.status is not RequestStatus.RUNNING:
            raise InvariantError(f"{request!r} is among the running.")
        # Drafts and tokens on their way are computed before they are known.
        num_unknown = request.num_output_placeholders + unknown.get(request.request_id, 0)
        most = request.num_tokens + num_unknown
        if not 0 < request.num_computed_tokens <= most:
            raise InvariantError(f"{request!r} has computed more than there is, or nothing.")
    for request in waiting:
        if request.status not in _WAITING_STATUSES:
            raise InvariantError(f"{request!r} is among the waiting.")
        if request.num_output_placeholders or request.spec_token_ids:
            raise InvariantError(f"{request!r} waits and expects tokens.")
        may_be_loaded = has_connector and request.status in _LOADED_STATUSES
        if request.num_computed_tokens != 0 and not may_be_loaded:
            raise InvariantError(f"{request!r} waits but has computed tokens.")
    for request in queued:
        if request.num_tokens >= request.max_num_tokens:
            raise InvariantError(f"{request!r} should have ended by its length.")


def check_blocks(
    manager: KVCacheManager,
    running: Iterable[Request],
    waiting: Iterable[Request],
    other_holders: Iterable[Request],
) -> None:
    """Checks that requests hold blocks exactly where they may, and enough of them.

    Args:
        other_holders: Finished ones whose blocks are kept, or used by a transfer.

    Raises:
        InvariantError: They do not.
    """
    for request in waiting:
        may_hold = (
            request.num_computed_tokens > 0
            or request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        )
        if not may_hold and not manager.get_blocks(request.request_id).is_empty():
            raise InvariantError(f"{request!r} waits and holds blocks.")
    for request in other_holders:
        if not request.is_finished:
            raise InvariantError(f"{request!r} is kept as if it had ended.")
    for request in running:
        for group_manager in manager.coordinator.single_type_managers:
            if not group_manager.is_written_by_decoder:
                continue
            num_blocks = len(group_manager.get_blocks(request.request_id))
            if num_blocks * group_manager.block_size < request.num_computed_tokens:
                raise InvariantError(f"{request!r} has only {num_blocks} blocks.")
