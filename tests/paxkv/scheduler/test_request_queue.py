"""Waiting queues: the order of each policy."""

import pytest

from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.engine_request import EngineRequest
from paxkv.scheduler.request import Request
from paxkv.scheduler.request_queue import (
    FCFSRequestQueue,
    PriorityRequestQueue,
    create_request_queue,
)


def make_request(request_id, *, priority=0, arrival_time=0.0):
    return Request(
        EngineRequest(
            request_id=request_id,
            prompt_token_ids=[1],
            sampling_params=SamplingParams(),
            priority=priority,
            arrival_time=arrival_time,
        ),
        max_num_tokens=8,
    )


def drain(queue):
    popped = []
    while queue:
        front = queue.peek_request()
        assert queue.pop_request() is front
        popped.append(front.request_id)
    return "".join(popped)


def test_fcfs_keeps_arrival_order_and_puts_preempted_requests_in_front():
    queue = create_request_queue("fcfs")
    assert isinstance(queue, FCFSRequestQueue)
    for request_id in "abc":
        queue.add_request(make_request(request_id))
    # Preempted from the end of the running list: "y" after "z", so "y" arrived earlier.
    for request_id in "zy":
        queue.prepend_request(make_request(request_id))
    assert [request.request_id for request in queue] == list("yzabc")
    assert len(queue) == 5
    assert drain(queue) == "yzabc"


def test_priority_orders_by_priority_then_arrival_then_id():
    queue = create_request_queue("priority")
    assert isinstance(queue, PriorityRequestQueue)
    for request_id, priority, arrival_time in (
        ("e", 1, 0.0),
        ("d", 0, 3.0),
        ("c", 0, 2.0),
        ("b", 0, 2.0),
        ("f", 1, 1.0),
    ):
        queue.add_request(make_request(request_id, priority=priority, arrival_time=arrival_time))
    queue.prepend_request(make_request("a", priority=-1, arrival_time=9.0))
    assert [request.request_id for request in queue] == list("abcdef")
    assert drain(queue) == "abcdef"


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_requests_can_be_removed_from_anywhere(policy):
    queue = create_request_queue(policy)
    for i, request_id in enumerate("abcde"):
        queue.add_request(make_request(request_id, arrival_time=float(i)))
    queue.remove_requests({"a", "c", "unknown"})
    assert drain(queue) == "bde"


def test_remaining_requests_keep_the_priority_order():
    queue = create_request_queue("priority")
    for request_id in "afbghcd":
        queue.add_request(make_request(request_id, arrival_time=float(ord(request_id))))
    queue.remove_requests({"a"})
    assert drain(queue) == "bcdfgh"


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_an_empty_queue_has_no_front(policy):
    queue = create_request_queue(policy)
    assert not queue
    with pytest.raises(IndexError):
        queue.peek_request()
    with pytest.raises(IndexError):
        queue.pop_request()


def test_skipped_requests_return_to_the_front_in_order():
    for policy in ("fcfs", "priority"):
        queue = create_request_queue(policy)
        for arrival_time, request_id in enumerate("abcd"):
            queue.add_request(make_request(request_id, arrival_time=float(arrival_time)))
        skipped = [queue.pop_request(), queue.pop_request()]
        queue.prepend_requests(iter(skipped))
        assert drain(queue) == "abcd"
