"""The core's thread exchanges bytes, sleeps when idle, and always sends `EngineDead`."""

import asyncio
import gc
import queue
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paxkv.contracts import wire
from paxkv.contracts.engine_output import EngineDead, EngineOutput, StepOutputs, UtilityReply
from paxkv.contracts.engine_request import (
    AbortRequests,
    AddRequest,
    EngineInput,
    Shutdown,
    UtilityCall,
)
from paxkv.contracts.scheduler_output import SchedulerOutput
from paxkv.engine.core_loop import run_core
from paxkv.engine.core_thread import CoreThread
from paxkv.engine.engine_core import EngineCore
from paxkv.entrypoints.build_scheduler import make_scheduler, record_scheduler
from paxkv.errors import EngineDeadError
from paxkv.trace.calls import ScheduleCall
from paxkv.trace.replayer import replay
from paxkv.trace.trace_file import TraceReader
from tests.paxkv.engine.fake_engine import (
    FakeClock,
    FakeExecutor,
    FakeStep,
    make_engine_core,
    make_request,
)
from tests.paxkv.trace.small_traces import make_header

TIMEOUT_S = 60.0


@contextmanager
def running(**arguments: object) -> Iterator[CoreThread]:
    transport = CoreThread(make_engine_core(**arguments))
    try:
        yield transport
    finally:
        transport.close()


def receive_until(transport: CoreThread, request_id: str) -> tuple[list[int], str]:
    """Tokens and finish reason of a request."""
    token_ids = []
    while True:
        message = transport.receive(TIMEOUT_S)
        assert isinstance(message, StepOutputs), message
        for output in message.outputs:
            if output.request_id == request_id:
                token_ids += output.new_token_ids
                if output.finish_reason is not None:
                    return token_ids, output.finish_reason


def receive_reply(transport: CoreThread) -> UtilityReply:
    while True:
        message = transport.receive(TIMEOUT_S)
        if isinstance(message, UtilityReply):
            return message


def receive_last(transport: CoreThread) -> list[EngineOutput]:
    """All messages up to `EngineDead`."""
    messages = []
    while not messages or not isinstance(messages[-1], EngineDead):
        messages.append(transport.receive(TIMEOUT_S))
        assert messages[-1] is not None
    return messages


def test_request_is_answered_with_its_tokens() -> None:
    with running() as transport:
        transport.send(AddRequest(request=make_request("a", [5, 6], max_tokens=3)))
        assert receive_until(transport, "a") == ([5, 6, 5], "length")


def test_threads_exchange_only_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = []

    class SpyQueue(queue.Queue):
        def put(self, item: object) -> None:
            passed.append(item)
            super().put(item)

    monkeypatch.setattr(queue, "SimpleQueue", SpyQueue)
    with running() as transport:
        transport.send(AddRequest(request=make_request("a", [5])))
        receive_until(transport, "a")
        transport.send(UtilityCall(call_id=0, method="get_stats"))
        receive_reply(transport)
    assert len(passed) >= 7
    assert {type(item) for item in passed} == {bytes}


def test_idle_engine_sleeps() -> None:
    core = make_engine_core()
    transport = CoreThread(core)
    transport.send(AddRequest(request=make_request("a", [5], max_tokens=2)))
    receive_until(transport, "a")
    # The last step only reports the end of "a" to the executor.
    while core.has_work:
        time.sleep(0.001)
    transport.send(UtilityCall(call_id=0, method="get_stats"))
    receive_reply(transport)
    clock = time.pthread_getcpuclockid(transport._thread.ident)
    num_steps, cpu_s = core._executor.num_steps, time.clock_gettime(clock)
    assert transport.receive(0.3) is None
    assert core._executor.num_steps == num_steps
    # The processor time of this thread only.
    assert time.clock_gettime(clock) - cpu_s < 0.15
    transport.close()


def test_given_up_engine_delivers_one_engine_dead_and_nothing_else() -> None:
    heard, loop = [], asyncio.new_event_loop()
    with running() as transport:
        before = set(threading.enumerate())
        transport.deliver_on(loop, heard.append)
        (receiver,) = set(threading.enumerate()) - before
        for reason in ("no use", "still none"):
            transport.give_up(reason)
        # The engine's own last message comes here.
        receiver.join(TIMEOUT_S)
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert heard == [EngineDead(reason="no use")]


def test_waiting_messages_are_handled_before_the_next_step() -> None:
    core = make_engine_core()
    has_begun, may_go_on = threading.Event(), threading.Event()
    execute_model = core._executor.execute_model

    def execute_when_allowed(scheduler_output: SchedulerOutput) -> FakeStep:
        has_begun.set()
        assert may_go_on.wait(TIMEOUT_S)
        return execute_model(scheduler_output)

    core._executor.execute_model = execute_when_allowed
    transport = CoreThread(core)
    transport.send(AddRequest(request=make_request("a", [5], max_tokens=200)))
    assert has_begun.wait(TIMEOUT_S)
    late = [f"b{number}" for number in range(10)]
    for request_id in late:
        transport.send(AddRequest(request=make_request(request_id, [6], max_tokens=1)))
    transport.send(AbortRequests(request_ids=["a"]))
    may_go_on.set()
    first, second = transport.receive(TIMEOUT_S), transport.receive(TIMEOUT_S)
    assert [output.request_id for output in first.outputs] == ["a"]
    assert [output.request_id for output in second.outputs] == late
    transport.close()


def test_new_request_waits_only_for_the_running_burst() -> None:
    with running(max_steps_in_flight=2, max_decode_burst=4, device_step_s=0.04) as transport:
        transport.send(AddRequest(request=make_request("a", [5], max_tokens=200)))
        # Steps between a request's arrival and its first step. A busy machine may delay some.
        nums_steps_before = []
        while len(nums_steps_before) < 3 or (
            min(nums_steps_before) > 1 and len(nums_steps_before) < 10
        ):
            number = len(nums_steps_before)
            num_bursts = 0
            while num_bursts < 1:
                (output,) = transport.receive(TIMEOUT_S).outputs
                num_bursts += len(output.new_token_ids) == 4
            # Another burst has just begun.
            transport.send(AddRequest(request=make_request(f"b{number}", [6], max_tokens=1)))
            nums_steps_before.append(0)
            while len(transport.receive(TIMEOUT_S).outputs) == 1:
                nums_steps_before[-1] += 1
        assert min(nums_steps_before) == 1


class ClockChannel:
    """The core's end of a channel, where waiting only advances a fake clock.

    Args:
        messages: What waits there at the beginning.
    """

    def __init__(self, clock: FakeClock, *messages: EngineInput) -> None:
        self._clock = clock
        self.messages = list(messages)
        # Time and data of each sent message.
        self.outputs: list[tuple[float, EngineOutput]] = []

    def waiting_messages(self, wait_s: float | None) -> Iterator[bytes]:
        if wait_s is None and not self.messages:
            self.messages.append(Shutdown())
        while self.messages:
            yield wire.encode(self.messages.pop(0))
        if wait_s:
            self.record_wait(wait_s)
            self._clock.sleep(wait_s)

    def record_wait(self, wait_s: float) -> None: ...

    def send(self, data: bytes) -> None:
        self.outputs.append((self._clock.now_s, wire.decode_output(data)))

    def count_step(self) -> None: ...


def test_burst_that_ends_early_is_fetched_early(clock: FakeClock) -> None:
    # Bursts of 1, 2 and 4 steps; the first token of the next burst ends the request.
    request = make_request("a", [5, 6, 6, 7, 7, 7, 7, 0], max_tokens=100)
    channel = ClockChannel(clock, AddRequest(request=request))
    core = make_engine_core(max_steps_in_flight=2, max_decode_burst=4, device_step_s=0.04)
    run_core(core, channel)
    *_, (before_s, before), (end_s, end) = (
        (at_s, output.outputs[0]) for at_s, output in channel.outputs if output.outputs
    )
    assert (len(before.new_token_ids), end.new_token_ids, end.finish_reason) == (4, [0], "stop")
    # The duration of one step instead of four, until the next check of the device.
    assert end_s - before_s == pytest.approx(0.04, abs=0.005)


def test_shutdown_does_not_wait_for_new_requests(clock: FakeClock) -> None:
    ends_s = []

    class Channel(ClockChannel):
        """Sends `Shutdown` while the engine waits for requests."""

        def record_wait(self, wait_s: float) -> None:
            if not ends_s:
                self.messages.append(Shutdown())
            ends_s.append(clock.now_s)

    channel = Channel(clock, AddRequest(request=make_request("a", [5], max_tokens=100)))
    core = make_engine_core(max_steps_in_flight=2, max_decode_burst=1, device_step_s=3600.0)
    assert run_core(core, channel) == EngineDead(reason="it was shut down")
    assert ends_s[0] > 3600 and clock.now_s - ends_s[0] < 1


def test_engine_dead_contains_the_error_of_a_failed_step(caplog: pytest.LogCaptureFixture) -> None:
    with running(fails_at_step=2) as transport:
        transport.send(AddRequest(request=make_request("a", [5], max_tokens=9)))
        messages = receive_last(transport)
        assert len(messages) == 3
        assert messages[-1].reason == "RuntimeError: the device is on fire"
        assert "Traceback" in caplog.text
        # Later calls of `receive` return it too.
        assert transport.receive(TIMEOUT_S) == messages[-1]
        with pytest.raises(EngineDeadError):
            transport.send(AbortRequests(request_ids=["a"]))


def test_undecodable_message_ends_the_engine() -> None:
    with running() as transport:
        transport._inputs.put(b"\x00")
        assert "InvariantError" in transport.receive(TIMEOUT_S).reason


def test_drain_lets_requests_finish() -> None:
    with running(step_s=0.001) as transport:
        transport.send(AddRequest(request=make_request("a", [5], max_tokens=30)))
        transport.send(Shutdown(drain=True))
        assert receive_until(transport, "a") == ([5] * 30, "length")
        assert receive_last(transport)[-1].reason == "it was shut down"


def test_close_ends_a_busy_engine_and_may_be_repeated() -> None:
    transport = CoreThread(make_engine_core(step_s=0.001))
    transport.send(AddRequest(request=make_request("a", [5], max_tokens=250)))
    transport.receive(TIMEOUT_S)
    transport.close()
    transport.close()
    assert not transport._thread.is_alive()
    assert isinstance(receive_last(transport)[-1], EngineDead)


def test_thread_holds_no_reference_to_its_transport() -> None:
    transport = CoreThread(make_engine_core())
    thread, reference = transport._thread, weakref.ref(transport)
    inputs = transport._inputs
    del transport
    gc.collect()
    assert reference() is None
    assert thread.is_alive() and thread.daemon and thread in threading.enumerate()
    inputs.put(b"")
    thread.join(TIMEOUT_S)


def test_trace_ends_with_the_step_that_failed_on_the_device(tmp_path: Path) -> None:
    header = make_header()
    scheduler = record_scheduler(header, tmp_path / "t")
    executor = FakeExecutor(header.kv_cache_config, fails_at_step=1)
    transport = CoreThread(EngineCore(scheduler, executor))
    transport.send(AddRequest(request=make_request("a", [5], max_tokens=9)))
    while not isinstance(transport.receive(TIMEOUT_S), EngineDead):
        pass
    transport.close()
    *_, last = TraceReader.open(tmp_path / "t").lines()
    assert [(type(call), call.step) for call in last.calls] == [(ScheduleCall, 2)]
    assert replay(TraceReader.open(tmp_path / "t"), make_scheduler).num_steps == 2
