"""The core's thread passes only bytes, sleeps when idle, and always says that it ended."""

import gc
import queue
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paxkv.contracts.engine_output import EngineDead, EngineOutput, StepOutputs, UtilityReply
from paxkv.contracts.engine_request import AbortRequests, AddRequest, Shutdown, UtilityCall
from paxkv.contracts.scheduler_output import SchedulerOutput
from paxkv.engine.core_thread import CoreThread
from paxkv.engine.engine_core import EngineCore
from paxkv.errors import EngineDeadError
from paxkv.scheduler.trace.calls import ScheduleCall
from paxkv.scheduler.trace.recorder import record_scheduler
from paxkv.scheduler.trace.replayer import replay
from paxkv.scheduler.trace.trace_file import TraceReader
from tests.paxkv.engine.fake_engine import (
    FakeExecutor,
    FakeStep,
    make_engine_core,
    make_request,
)
from tests.paxkv.scheduler.trace.small_traces import make_header

TIMEOUT_S = 20.0


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
    """All messages to the end."""
    messages = []
    while not messages or not isinstance(messages[-1], EngineDead):
        messages.append(transport.receive(TIMEOUT_S))
        assert messages[-1] is not None
    return messages


def test_request_goes_in_and_tokens_come_out() -> None:
    with running() as transport:
        transport.send(AddRequest(request=make_request("a", [5, 6], max_tokens=3)))
        assert receive_until(transport, "a") == ([5, 6, 5], "length")


def test_only_bytes_pass_between_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
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
    transport.send(UtilityCall(call_id=0, method="get_stats"))
    receive_reply(transport)
    num_steps, cpu_s = core._executor.num_steps, time.process_time()
    assert transport.receive(0.3) is None
    assert core._executor.num_steps == num_steps
    assert time.process_time() - cpu_s < 0.15
    transport.close()


def test_waiting_messages_are_obeyed_before_the_next_step() -> None:
    core = make_engine_core()
    has_begun, may_go_on = threading.Event(), threading.Event()
    execute_model = core._executor.execute_model

    def execute_when_told(scheduler_output: SchedulerOutput) -> FakeStep:
        has_begun.set()
        assert may_go_on.wait(TIMEOUT_S)
        return execute_model(scheduler_output)

    core._executor.execute_model = execute_when_told
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


def test_arrival_waits_for_the_burst_that_runs_and_no_other() -> None:
    with running(max_steps_in_flight=2, max_decode_burst=4, device_step_s=0.04) as transport:
        transport.send(AddRequest(request=make_request("a", [5], max_tokens=200)))
        # Steps that an arrival saw before its own. A busy machine may let one be late, not all.
        nums_steps_before = []
        for number in range(3):
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


def test_burst_that_ends_early_is_fetched_then() -> None:
    times_s = []
    for _ in range(3):
        with running(max_steps_in_flight=2, max_decode_burst=4, device_step_s=0.04) as transport:
            # Its tokens come as 1, 2 and 4; of the next four the first is the end.
            prompt = [5, 6, 6, 7, 7, 7, 7, 0]
            transport.send(AddRequest(request=make_request("a", prompt, max_tokens=100)))
            outputs = []
            while not outputs or outputs[-1].finish_reason is None:
                began_s = time.perf_counter()
                outputs += transport.receive(TIMEOUT_S).outputs
            times_s.append(time.perf_counter() - began_s)
            assert len(outputs[-1].new_token_ids) == 1
    # One step, and not most of the four that it might have been; on a busy machine not each time.
    assert min(times_s) < 0.09


def test_shutdown_waits_for_no_arrivals() -> None:
    transport = CoreThread(
        make_engine_core(max_steps_in_flight=2, max_decode_burst=1, device_step_s=2.0)
    )
    transport.send(AddRequest(request=make_request("a", [5], max_tokens=100)))
    for _ in range(2):
        transport.receive(TIMEOUT_S)
    began_s = time.perf_counter()
    transport.close()
    assert time.perf_counter() - began_s < 1.5


def test_failing_step_ends_the_engine_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with running(fails_at_step=2) as transport:
        transport.send(AddRequest(request=make_request("a", [5], max_tokens=9)))
        messages = receive_last(transport)
        assert len(messages) == 3
        assert messages[-1].reason == "RuntimeError: the device is on fire"
        assert "Traceback" in caplog.text
        # Whoever comes later hears it too.
        assert transport.receive(TIMEOUT_S) == messages[-1]
        with pytest.raises(EngineDeadError):
            transport.send(AbortRequests(request_ids=["a"]))


def test_bytes_that_are_no_message_end_the_engine() -> None:
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


def test_thread_does_not_keep_its_transport_alive() -> None:
    transport = CoreThread(make_engine_core())
    thread, reference = transport._thread, weakref.ref(transport)
    inputs = transport._inputs
    del transport
    gc.collect()
    assert reference() is None
    assert thread.is_alive() and thread.daemon and thread in threading.enumerate()
    inputs.put(b"")
    thread.join(TIMEOUT_S)


def test_step_in_which_the_device_failed_is_the_last_of_the_trace(tmp_path: Path) -> None:
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
    assert replay(TraceReader.open(tmp_path / "t")).num_steps == 2
