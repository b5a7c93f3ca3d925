"""Queues of waiting requests: in order of arrival, or by priority."""

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Container, Iterable, Iterator

from paxkv.config.scheduler_config import SchedulerPolicy
from paxkv.scheduler.request import Request


class RequestQueue(ABC):
    """Waiting requests. The request at the front is admitted next."""

    @abstractmethod
    def add_request(self, request: Request) -> None:
        """Adds a request that has just arrived."""

    @abstractmethod
    def prepend_request(self, request: Request) -> None:
        """Returns a preempted request to the queue, before requests that have not run yet."""

    @abstractmethod
    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Returns popped requests to the front of the queue, in the order of `requests`."""

    @abstractmethod
    def peek_request(self) -> Request:
        """The request at the front. Raises IndexError if the queue is empty."""

    @abstractmethod
    def pop_request(self) -> Request:
        """Removes and returns the request at the front. Raises IndexError if the queue is empty."""

    @abstractmethod
    def remove_requests(self, request_ids: Container[str]) -> None:
        """Removes requests anywhere in the queue, in O(n). Unknown ids are ignored."""

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
    """Lowest `priority` first, then earliest arrival. The same order holds after a preemption."""

    def __init__(self) -> None:
        # Sort keys contain the unique request id, so `heapq` never compares two requests.
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
    """An empty queue that orders requests by `policy`."""
    return PriorityRequestQueue() if policy == "priority" else FCFSRequestQueue()
