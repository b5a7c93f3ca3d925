"""Queues of waiting requests: by arrival, or by priority."""

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Container, Iterable, Iterator

from paxkv.config.engine_config import SchedulerPolicy
from paxkv.scheduler.request import Request


class RequestQueue(ABC):
    """Waiting requests, the next to be admitted in front."""

    @abstractmethod
    def add_request(self, request: Request) -> None:
        """Puts in a request that has just arrived."""

    @abstractmethod
    def prepend_request(self, request: Request) -> None:
        """Puts back a preempted request, before those that have not run yet."""

    @abstractmethod
    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Puts back requests that were popped in this order, so that they stand in it again."""

    @abstractmethod
    def peek_request(self) -> Request:
        """The request in front; IndexError when there is none."""

    @abstractmethod
    def pop_request(self) -> Request:
        """Takes the request in front; IndexError when there is none."""

    @abstractmethod
    def remove_requests(self, request_ids: Container[str]) -> None:
        """Takes out requests wherever they stand; ids that are not here are ignored. O(n)."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """Requests in the order in which they would be popped."""


class FCFSRequestQueue(RequestQueue):
    """First come, first served."""

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()

    def add_request(self, request: Request) -> None:
        self._queue.append(request)

    def prepend_request(self, request: Request) -> None:
        self._queue.appendleft(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        self._queue.extendleft(reversed(list(requests)))

    def peek_request(self) -> Request:
        return self._queue[0]

    def pop_request(self) -> Request:
        return self._queue.popleft()

    def remove_requests(self, request_ids: Container[str]) -> None:
        self._queue = deque(r for r in self._queue if r.request_id not in request_ids)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)


class PriorityRequestQueue(RequestQueue):
    """Lowest `priority` first, then earliest arrival; a preempted request has no other place."""

    def __init__(self) -> None:
        # Ids are unique, so keys are, and no comparison reaches the request itself.
        self._heap: list[tuple[tuple[int, float, str], Request]] = []

    def add_request(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.sort_key, request))

    def prepend_request(self, request: Request) -> None:
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.add_request(request)

    def peek_request(self) -> Request:
        return self._heap[0][1]

    def pop_request(self) -> Request:
        return heapq.heappop(self._heap)[1]

    def remove_requests(self, request_ids: Container[str]) -> None:
        self._heap = [entry for entry in self._heap if entry[1].request_id not in request_ids]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in sorted(self._heap))


def create_request_queue(policy: SchedulerPolicy) -> RequestQueue:
    """An empty queue of the policy."""
    return PriorityRequestQueue() if policy == "priority" else FCFSRequestQueue()
