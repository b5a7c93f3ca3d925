"""The KV cache manager behaves as its slow model does, with every kind of group."""

import pytest

from tests.slow_model.manager_machine import ManagerMachine
from tests.slow_model.specs import chunk, cross, full, sink, state, window
from tests.slow_model.state_machine_settings import long, quick


class FullMachine(ManagerMachine):
    KINDS = ((full(2),), (full(4),))
    CACHING = (True, True, True, False)


class WindowMachine(ManagerMachine):
    KINDS = tuple((window(size, 2),) for size in (2, 3, 4, 5, 6, 9)) + ((window(6, 4),),)
    CACHING = (True, True, True, False)


class ChunkMachine(ManagerMachine):
    KINDS = tuple((chunk(size, 2),) for size in (2, 4, 6, 8))


class StateMachine(ManagerMachine):
    KINDS = (
        (state(1, 2),),
        (full(2), state(3, 2)),
        (state(2, 4), full(4)),
        (full(2), window(4, 2), state(2, 4)),
        (full(2), state(1, 2), state(2, 2)),
    )
    CACHING = (True, True, True, False)


class HybridMachine(ManagerMachine):
    KINDS = (
        (full(2), window(4, 2)),
        (full(2), window(3, 2), window(3, 2)),
        (window(5, 2), full(2)),
        (full(4), window(4, 2)),
        (full(2), window(7, 4)),
        (full(2), window(3, 2), window(7, 4)),
        (full(2), chunk(4, 2)),
        (window(4, 2), window(8, 4)),
        (window(4, 2), chunk(8, 4)),
        (full(2), full(4)),
    )
    CACHING = (True, True, True, True, False)


class CrossAndSinkMachine(ManagerMachine):
    KINDS = ((full(2), cross(2)), (cross(4), full(4)), (sink(2, 2),), (sink(8, 4), window(5, 2)))
    CACHING = (True, False)


class TestFull(FullMachine.TestCase):
    settings = quick(10)


class TestWindow(WindowMachine.TestCase):
    settings = quick(10)


class TestChunk(ChunkMachine.TestCase):
    settings = quick(10)


class TestState(StateMachine.TestCase):
    settings = quick(10)


class TestCrossAndSink(CrossAndSinkMachine.TestCase):
    settings = quick(10)


class TestHybrid(HybridMachine.TestCase):
    settings = quick(10)


@pytest.mark.slow
class TestFullForLong(FullMachine.TestCase):
    settings = long(1000)


@pytest.mark.slow
class TestWindowForLong(WindowMachine.TestCase):
    settings = long(1000)


@pytest.mark.slow
class TestChunkForLong(ChunkMachine.TestCase):
    settings = long(1000)


@pytest.mark.slow
class TestStateForLong(StateMachine.TestCase):
    settings = long(1000)


@pytest.mark.slow
class TestCrossAndSinkForLong(CrossAndSinkMachine.TestCase):
    settings = long(1000)


@pytest.mark.slow
class TestHybridForLong(HybridMachine.TestCase):
    settings = long(2000)
