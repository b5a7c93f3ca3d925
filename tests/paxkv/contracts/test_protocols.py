"""Both schedulers implement the Protocol that the engine core calls."""

import inspect

import pytest

from paxkv.contracts.protocols import ScheduledRequest, Scheduler
from paxkv.scheduler import scheduler as plain
from paxkv.scheduler.request import Request
from paxkv.trace.recorder import TraceRecorder
from tests.paxkv.scheduler.stepping import add, make_scheduler


def members(protocol):
    return {name: value for name, value in vars(protocol).items() if name[0] != "_"}


METHODS = {name: value for name, value in members(Scheduler).items() if inspect.isfunction(value)}


@pytest.mark.parametrize("name", METHODS)
def test_scheduler_and_recorder_implement_the_protocol(name):
    wanted = inspect.signature(METHODS[name]).parameters
    # The recorder forwards methods that it does not report.
    recorded = getattr(TraceRecorder, name, getattr(plain.Scheduler, name))
    for method in (getattr(plain.Scheduler, name), recorded):
        got = inspect.signature(method).parameters
        assert list(got) == list(wanted)
        for parameter, wanted_parameter in zip(got.values(), wanted.values(), strict=True):
            assert parameter.kind == wanted_parameter.kind
            assert parameter.default == wanted_parameter.default


def test_requests_have_the_attributes_of_the_protocols():
    scheduler = make_scheduler()
    request = add(scheduler, "a", 3)
    assert scheduler.requests == {"a": request} and scheduler.running == []
    assert isinstance(request, Request) and len(members(ScheduledRequest)) == 6
    for name in members(ScheduledRequest):
        getattr(request, name)
