"""The rules that hold between two steps for requests and queues, as checks."""

from collections.abc import Iterable, Mapping

from paxkv.errors import InvariantError
from paxkv.scheduler.request import Request, RequestStatus


def check_requests(
    requests: Mapping[str, Request], running: Iterable[Request], waiting: Iterable[Request]
) -> None:
    """Checks that each unfinished request is in one queue, in a status that fits it.

    Raises:
        InvariantError: One is not.
    """
    queued = [*running, *waiting]
    if len(queued) != len(requests):
        raise InvariantError(f"{len(queued)} requests are queued, {len(requests)} are known.")
    for request in queued:
        if requests.get(request.request_id) is not request:
            raise InvariantError(f"{request!r} is queued but not known.")
    for request in running:
        if request.status is not RequestStatus.RUNNING:
            raise InvariantError(f"{request!r} is among the running.")
        if not 0 < request.num_computed_tokens <= request.num_tokens:
            raise InvariantError(f"{request!r} has computed more than there is, or nothing.")
    for request in waiting:
        if request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            raise InvariantError(f"{request!r} is among the waiting.")
        if request.num_computed_tokens != 0:
            raise InvariantError(f"{request!r} waits but has computed tokens.")
    for request in queued:
        if request.num_tokens >= request.max_num_tokens:
            raise InvariantError(f"{request!r} should have ended by its length.")
