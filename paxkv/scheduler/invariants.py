"""Checks of the rules that hold for requests, queues and blocks between two steps."""

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
    """Checks that each unfinished request is in exactly one queue and has a matching status.

    Args:
        num_unknown_tokens: See `StepsInFlight.count_unknown_tokens`.
        has_connector: Waiting requests may have tokens that were loaded for them.

    Raises:
        InvariantError: A rule is broken.
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
            raise InvariantError(f"{request!r} is in the running list, but has another status.")
        # Drafts and tokens of steps in flight are computed before the host has received them.
        num_unknown = request.num_output_placeholders + unknown.get(request.request_id, 0)
        most = request.num_tokens + num_unknown
        if not 0 < request.num_computed_tokens <= most:
            raise InvariantError(f"{request!r} must have 1 to {most} computed tokens.")
    for request in waiting:
        if request.status not in _WAITING_STATUSES:
            raise InvariantError(f"{request!r} is in the waiting queue, but has another status.")
        if request.num_output_placeholders or request.spec_token_ids:
            raise InvariantError(f"{request!r} waits but has drafts or placeholders.")
        may_be_loaded = has_connector and request.status in _LOADED_STATUSES
        if request.num_computed_tokens != 0 and not may_be_loaded:
            raise InvariantError(f"{request!r} waits but has computed tokens.")
    for request in queued:
        if request.num_tokens >= request.max_num_tokens:
            raise InvariantError(
                f"{request!r} should have ended: max_num_tokens is {request.max_num_tokens}."
            )


def check_blocks(
    manager: KVCacheManager,
    running: Iterable[Request],
    waiting: Iterable[Request],
    other_holders: Iterable[Request],
) -> None:
    """Checks that running requests hold enough blocks, and that only permitted requests hold any.

    Args:
        other_holders: Finished requests whose blocks are kept for forks or used by a transfer.

    Raises:
        InvariantError: A rule is broken.
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
            raise InvariantError(f"{request!r} is kept like a finished request, but is unfinished.")
    for request in running:
        for group_manager in manager.coordinator.single_type_managers:
            if not group_manager.is_written_by_decoder:
                continue
            num_blocks = len(group_manager.get_blocks(request.request_id))
            if not group_manager.holds_tokens:
                if num_blocks == 0:
                    raise InvariantError(f"{request!r} has no slot for its state.")
                continue
            if num_blocks * group_manager.block_size < request.num_computed_tokens:
                raise InvariantError(
                    f"{request!r} has only {num_blocks} blocks of {group_manager.block_size} slots."
                )
