"""Steps return in the order in which they were scheduled, without discarded requests."""

import pytest

from paxkv.errors import InvariantError
from paxkv.scheduler.async_scheduler import AsyncScheduler
from paxkv.scheduler.scheduler import Scheduler
from paxkv.scheduler.steps_in_flight import StepsInFlight
from tests.paxkv.scheduler.in_memory_connector import InMemoryConnector
from tests.paxkv.scheduler.stepping import FunctionRunner, add, make_scheduler, step


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


def test_discard_removes_a_request_but_not_another_with_the_same_id():
    steps, request, (first, second) = make_steps()
    _, namesake, _ = make_steps(0)
    steps.discard(namesake)
    assert steps.get_requests(first) == {"a": request}
    steps.discard(request)
    assert steps.get_requests(first) == {}
    steps.remove(first)
    assert steps.get_requests(second) == {}


def test_tokens_after_a_load_in_flight_are_not_sure_until_its_step_returns():
    connector = InMemoryConnector()
    connector.store(range(12))
    scheduler = make_scheduler(AsyncScheduler, connector=connector)
    hit = add(scheduler, "a", [*range(4), 99])
    steps, outputs = scheduler.steps_in_flight, [scheduler.schedule()]
    request = add(scheduler, "b", range(14))
    outputs += [scheduler.schedule(), scheduler.schedule()]
    # 4 tokens are hits in blocks that "a" loads; 8 are loaded, and 2 and 1 are computed.
    assert (request.num_computed_tokens, steps.num_sure_tokens(request)) == (15, 4)
    assert steps.num_sure_tokens(hit) == 0
    steps.remove(outputs[0])
    assert steps.num_sure_tokens(hit) == hit.num_computed_tokens
    steps.remove(outputs[1])
    assert steps.num_sure_tokens(request) == 15


@pytest.mark.parametrize(("scheduler_class", "num_unknown"), [(AsyncScheduler, 0), (Scheduler, 3)])
def test_tokens_of_a_burst_without_placeholders_are_unknown(scheduler_class, num_unknown):
    scheduler, runner = make_scheduler(scheduler_class), FunctionRunner()
    add(scheduler, "a", 5)
    step(scheduler, runner)
    output = scheduler.schedule(4)
    unknown = scheduler.steps_in_flight.count_unknown_tokens()
    assert unknown == ({"a": num_unknown} if num_unknown else {})
    scheduler.check_invariants()
    scheduler.update_from_output(output, runner.execute(output))
    assert scheduler.steps_in_flight.count_unknown_tokens() == {}


def test_drafts_are_unknown_until_they_are_verified():
    scheduler, runner = make_scheduler(), FunctionRunner()
    add(scheduler, "a", 5)
    step(scheduler, runner, drafts={"a": [1, 2]})
    scheduler.schedule()
    assert scheduler.steps_in_flight.count_unknown_tokens() == {"a": 2}


def test_tokens_of_a_burst_after_the_end_of_a_request_are_not_sure():
    scheduler = make_scheduler(AsyncScheduler)
    request = add(scheduler, "a", 5)
    outputs = [scheduler.schedule(), scheduler.schedule(4)]
    steps = scheduler.steps_in_flight
    assert outputs[1].num_decode_steps == 4
    assert steps.num_sure_tokens(request) == request.num_computed_tokens == 9
    request.append_output_tokens([7])
    request.finish("stop")
    assert steps.num_sure_tokens(request) == 5


def test_a_step_without_requests_is_not_recorded():
    scheduler = make_scheduler()
    output = scheduler.schedule()
    assert len(scheduler.steps_in_flight) == 0
    assert scheduler.steps_in_flight.get_requests(output) == {}
