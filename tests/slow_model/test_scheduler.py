"""The scheduler behaves as its slow model does; each request gets the tokens it gets alone."""

import pytest

from paxkv.scheduler.async_scheduler import AsyncScheduler
from tests.slow_model.scheduler_machine import SchedulerMachine
from tests.slow_model.specs import chunk, full, state, window
from tests.slow_model.state_machine_settings import long, quick


class PriorityMachine(SchedulerMachine):
    POLICY = "priority"


class HybridMachine(SchedulerMachine):
    KINDS = (
        (full(2), window(4, 2)),
        (full(2), window(3, 2), window(3, 2)),
        (full(4), window(4, 2)),
        (full(2), window(7, 4)),
        (full(2), state(3, 2)),
        (full(2), chunk(4, 2)),
        (window(5, 2),),
    )


class HybridPriorityMachine(HybridMachine):
    POLICY = "priority"


class AsyncMachine(HybridMachine):
    KINDS = (*SchedulerMachine.KINDS, *HybridMachine.KINDS)
    SCHEDULER = AsyncScheduler
    NUM_STEPS_IN_FLIGHT = 2


class AsyncPriorityMachine(AsyncMachine):
    POLICY = "priority"


class QuietMachine(HybridPriorityMachine):
    KINDS = (*SchedulerMachine.KINDS, *HybridMachine.KINDS)
    QUIET_SHARE = 1


class QuietAsyncMachine(AsyncMachine):
    QUIET_SHARE = 1


class TestFCFS(SchedulerMachine.TestCase):
    settings = quick(10)


class TestPriority(PriorityMachine.TestCase):
    settings = quick(10)


class TestHybrid(HybridMachine.TestCase):
    settings = quick(10)


class TestHybridPriority(HybridPriorityMachine.TestCase):
    settings = quick(10)


class TestAsync(AsyncMachine.TestCase):
    settings = quick(10)


class TestAsyncPriority(AsyncPriorityMachine.TestCase):
    settings = quick(10)


class TestQuiet(QuietMachine.TestCase):
    settings = quick(10)


class TestQuietAsync(QuietAsyncMachine.TestCase):
    settings = quick(10)


@pytest.mark.slow
class TestFCFSForLong(SchedulerMachine.TestCase):
    settings = long(1000)


@pytest.mark.slow
class TestPriorityForLong(PriorityMachine.TestCase):
    settings = long(1000)


@pytest.mark.slow
class TestHybridForLong(HybridMachine.TestCase):
    settings = long(1000)


@pytest.mark.slow
class TestHybridPriorityForLong(HybridPriorityMachine.TestCase):
    settings = long(1000)


@pytest.mark.slow
class TestAsyncForLong(AsyncMachine.TestCase):
    settings = long(1000)


@pytest.mark.slow
class TestAsyncPriorityForLong(AsyncPriorityMachine.TestCase):
    settings = long(1000)


@pytest.mark.slow
class TestQuietForLong(QuietMachine.TestCase):
    settings = long(1000)


@pytest.mark.slow
class TestQuietAsyncForLong(QuietAsyncMachine.TestCase):
    settings = long(1000)
