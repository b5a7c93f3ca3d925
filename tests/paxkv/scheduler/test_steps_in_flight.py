"""Steps come back in the order in which they were scheduled, without those nobody waits for."""

import pytest

from paxkv.errors import InvariantError
from paxkv.scheduler.async_scheduler import AsyncScheduler
from paxkv.scheduler.steps_in_flight import StepsInFlight
from tests.paxkv.scheduler.in_memory_connector import InMemoryConnector
from tests.paxkv.scheduler.stepping import add, make_scheduler


def make_steps(num_steps=2):
    scheduler = make_scheduler(AsyncScheduler)
    request = add(scheduler, "a", 5)
    outputs = [scheduler.schedule() for _ in range(num_steps)]
    return scheduler.steps_in_flight, request, outputs


def test_the_oldest_step_comes_first():
    steps, request, (first, second) = make_steps()
    assert isinstance(steps, StepsInFlight)
    assert len(steps) == 2
    with pytest.raises(InvariantError, match="oldest of the 2"):
        steps.get_requests(second)
    assert steps.get_requests(first) == {"a": request}
    steps.remove(first)
    assert steps.get_requests(second) == {"a": request}
    steps.remove(second)
    with pytest.raises(InvariantError, match="oldest of the 0"):
        steps.get_requests(second)


def test_a_discarded_request_is_in_no_step_but_its_namesake_stays():
    steps, request, (first, second) = make_steps()
    _, namesake, _ = make_steps(0)
    steps.discard(namesake)
    assert steps.get_requests(first) == {"a": request}
    steps.discard(request)
    assert steps.get_requests(first) == {}
    steps.remove(first)
    assert steps.get_requests(second) == {}


def test_tokens_from_a_load_in_flight_on_are_not_sure_until_its_step_is_back():
    connector = InMemoryConnector()
    connector.store(range(12))
    scheduler = make_scheduler(AsyncScheduler, connector=connector)
    hit = add(scheduler, "a", [*range(4), 99])
    steps, outputs = scheduler.steps_in_flight, [scheduler.schedule()]
    request = add(scheduler, "b", range(14))
    outputs += [scheduler.schedule(), scheduler.schedule()]
    # 4 tokens are hits in what "a" loads; 8 are loaded, and 2 and 1 computed.
    assert (request.num_computed_tokens, steps.num_sure_tokens(request)) == (15, 4)
    assert steps.num_sure_tokens(hit) == 0
    steps.remove(outputs[0])
    assert steps.num_sure_tokens(hit) == hit.num_computed_tokens
    steps.remove(outputs[1])
    assert steps.num_sure_tokens(request) == 15


def test_a_step_without_requests_is_no_step():
    scheduler = make_scheduler()
    output = scheduler.schedule()
    assert len(scheduler.steps_in_flight) == 0
    assert scheduler.steps_in_flight.get_requests(output) == {}
