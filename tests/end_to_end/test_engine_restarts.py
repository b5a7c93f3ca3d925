"""When an engine is started again, how often and how soon, and what its client hears meanwhile."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine

import pytest

from paxkv.config.engine_config import EngineConfig
from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.contracts.engine_output import EngineDead, UtilityReply
from paxkv.contracts.engine_request import AbortRequests, Shutdown
from paxkv.contracts.engine_start import EngineReady
from paxkv.errors import ConfigError, EngineDeadError
from paxkv.fleet import engine_supervisor
from paxkv.fleet.engine_supervisor import EngineSupervisor, RestartPolicy
from tests.paxkv.client.fake_replicas import ready_engine
from tests.paxkv.engine.fake_engine import FakeClock

NOTHING_ELSE = AbortRequests(request_ids=["a"])


class FakeProcess:
    """An `EngineProcess` that ends when a test says so, and starts as its `World` has it."""

    step_count = num_sent = 0

    def __init__(self, world: "World", config: EngineConfig, **settings: object) -> None:
        self.config = config
        self.settings = settings
        self.calls: list[object] = []
        self.pid = len(world.processes)
        self._world = world
        self._has_ended = threading.Event()
        self._code = 0
        world.processes.append(self)
        if isinstance(world.outcome, OSError):
            raise world.outcome

    def wait_until_ready(self, on_model_found: object = None) -> EngineReady:
        self._world.clock.now_s += self._world.start_s
        if self._world.outcome is not None:
            raise self._world.outcome
        return ready_engine()

    def deliver_on(self, loop: object, on_message: Callable[[object], None]) -> None:
        self.say = on_message

    def send(self, message: object) -> None:
        self.calls.append(message)

    def wait(self) -> int:
        assert self._has_ended.wait(60)
        if isinstance(self._code, Exception):
            raise self._code
        return self._code

    def exit(self, code: int | Exception) -> None:
        self._code = code
        self._has_ended.set()

    def end(self) -> None:
        self.calls.append("end")
        self._has_ended.set()

    def kill(self) -> None:
        self.exit(-9)

    def kill_with_traceback(self) -> None:
        self.calls.append("kill")

    def release(self) -> None:
        self.calls.append("release")


class World:
    """One supervisor over fake processes, a clock, and what its client heard.

    Attributes:
        outcome: How starts fail; None is not at all.
        start_s: How long they take.
    """

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.processes: list[FakeProcess] = []
        self.outcome: Exception | None = None
        self.start_s = 0.0
        self.pauses_s: list[float] = []
        self.heard: list[object] = []
        self._supervisors: list[EngineSupervisor] = []

    def begin(
        self,
        *,
        config: EngineConfig | None = None,
        max_step_s: float = 0.0,
        stall_s: float = 0.0,
        **policy: float,
    ) -> EngineSupervisor:
        """A supervisor whose first engine is ready. Called on the loop."""
        policy = {"max_restarts": 1, "window_s": 60.0} | policy
        supervisor = EngineSupervisor(
            config or EngineConfig(),
            RestartPolicy(**policy),
            max_step_s=max_step_s,
            max_idle_start_s=90.0,
            stall_s=stall_s,
            show_progress=True,
            environment={"REPLICA": "1"},
        )
        assert supervisor.wait_until_ready(lambda folder: None) == ready_engine()
        self._supervisors.append(supervisor)
        supervisor._is_closing.wait = self._pause
        supervisor.deliver_on(asyncio.get_running_loop(), self.heard.append)
        return supervisor

    def _pause(self, timeout_s: float) -> bool:
        self.pauses_s.append(timeout_s)
        return False

    async def hears(self, kind: type) -> object:
        """The next message, which is of one kind."""
        while not self.heard:
            await asyncio.sleep(0.001)
        message = self.heard.pop(0)
        assert isinstance(message, kind), message
        return message

    def run(self, test: Callable[[], Coroutine]) -> None:
        """Runs a test on a loop, and ends its supervisors: they would go on in the next one."""

        async def run() -> None:
            try:
                await asyncio.wait_for(test(), 60)
            finally:
                for supervisor in self._supervisors:
                    await asyncio.to_thread(supervisor.close)

        asyncio.run(run())


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World(FakeClock())
    monkeypatch.setattr(engine_supervisor, "time", world.clock)
    monkeypatch.setattr(engine_supervisor, "_LAST_MESSAGE_S", 0.05)
    monkeypatch.setattr(
        engine_supervisor, "EngineProcess", lambda *a, **more: FakeProcess(world, *a, **more)
    )
    return world


@pytest.mark.parametrize("max_step_s", [0.0, 0.3])
def test_a_step_that_hangs_is_a_stall_until_it_completes(
    world: World, caplog: pytest.LogCaptureFixture, max_step_s: float
) -> None:
    async def passes(seconds: float) -> None:
        end_s = world.clock.now_s + seconds
        while world.clock.now_s < end_s:
            world.clock.now_s += 0.005
            await asyncio.sleep(0.006)

    async def test() -> None:
        supervisor = world.begin(stall_s=0.1, max_step_s=max_step_s)
        engine = world.processes[0]
        assert supervisor.stall is None
        # It has nothing to do, and then completes steps, the last of which takes long.
        await passes(0.2)
        for count in (1, 3, 5, 7):
            engine.step_count = count
            await passes(0.05)
            assert supervisor.stall is None
        await passes(0.15)
        assert "no step has completed for 0.1 seconds" in supervisor.stall
        assert "--max-step-seconds" in supervisor.stall
        engine.step_count = 9
        await passes(0.05)
        assert supervisor.stall is None
        engine.step_count = 10
        await passes(0.2)
        assert supervisor.stall is None
        # It does not wake up for a message.
        engine.num_sent = 1
        await passes(0.2)
        assert supervisor.stall is not None
        said = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert [text.split(",")[0] for text in said] == [
            "the engine has work",
            "the engine completes steps again",
            "the engine has work",
        ]
        if max_step_s > 0:
            await passes(0.3)
            assert engine.calls == ["kill"]
        else:
            engine.exit(-9)
        await world.hears(EngineDead)
        # The client reports the death; a start is no stall, however long it takes.
        assert supervisor.stall is None
        if max_step_s > 0:
            engine.exit(-9)
        await world.hears(EngineReady)
        await passes(0.2)
        assert supervisor.stall is None

    world.run(test)


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (ConfigError("no such model"), "no such model"),
        (EngineDeadError("killed"), "killed"),
        (OSError("no more processes"), "OSError: no more processes"),
    ],
)
def test_starts_that_fail_are_tried_again_after_longer_and_longer_pauses(
    world: World, outcome: Exception, words: str
) -> None:
    async def test() -> None:
        supervisor = world.begin(max_restarts=7)
        world.outcome = outcome
        world.processes[0].exit(-9)
        assert (await world.hears(EngineDead)).retry_after_s == 1
        dead = await world.hears(EngineDead)
        assert dead == EngineDead(reason=f"it could not be started again: {words}")
        assert world.pauses_s == [0, 1, 2, 4, 8, 16, 30]
        assert len(world.processes) == 8
        await asyncio.to_thread(supervisor.close)
        assert world.heard == []
        for process in world.processes[1:]:
            assert isinstance(outcome, OSError) or process.calls[:2] == ["end", "release"]

    world.run(test)


def test_an_engine_that_served_for_a_while_ends_the_row(world: World) -> None:
    async def test() -> None:
        world.begin(max_restarts=1, window_s=60.0)
        for served_s in (0.0, 60.0, 60.0):
            world.clock.now_s += served_s
            world.processes[-1].exit(-9)
            assert (await world.hears(EngineDead)).retry_after_s == 1
            await world.hears(EngineReady)
        assert world.pauses_s == [0, 0, 0]
        world.clock.now_s += 59.0
        world.processes[-1].exit(-11)
        dead = await world.hears(EngineDead)
        assert "SIGSEGV" in dead.reason and dead.retry_after_s is None

    world.run(test)


@pytest.mark.parametrize(("start_s", "retry_after_s"), [(0.0, 1), (3.2, 4), (100.0, 10)])
def test_retry_after_is_as_long_as_the_start_took(
    world: World, start_s: float, retry_after_s: int
) -> None:
    async def test() -> None:
        world.start_s = start_s
        world.begin()
        # How long it has served is nothing to it.
        world.clock.now_s += 500.0
        world.processes[0].exit(-9)
        assert (await world.hears(EngineDead)).retry_after_s == retry_after_s
        await world.hears(EngineReady)
        world.clock.now_s += 500.0
        world.processes[1].exit(-9)
        assert (await world.hears(EngineDead)).retry_after_s == retry_after_s

    world.run(test)


def test_its_own_last_words_say_why_it_ended(world: World) -> None:
    async def test() -> None:
        supervisor = world.begin(max_restarts=2)
        assert supervisor.pid == 0
        first = world.processes[0]
        first.say(UtilityReply(call_id=1, result_json="true"))
        await world.hears(UtilityReply)
        first.say(EngineDead(reason="the device is on fire"))
        # What comes now would be taken for the next one's.
        first.say("late")
        with pytest.raises(EngineDeadError):
            supervisor.send(NOTHING_ELSE)
        first.exit(0)
        assert (await world.hears(EngineDead)).reason == "the device is on fire"
        await world.hears(EngineReady)
        assert first.calls == ["release"]
        assert world.processes[1].config.scheduler.trace_file is None
        supervisor.send(NOTHING_ELSE)
        assert world.processes[1].calls == [NOTHING_ELSE]
        world.processes[1].say(UtilityReply(call_id=2, result_json="true"))
        assert (await world.hears(UtilityReply)).call_id == 2
        # No message gives a reason.
        world.processes[1].exit(3)
        assert "code 3" in (await world.hears(EngineDead)).reason

    world.run(test)


def test_last_messages_may_arrive_after_the_exit(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_supervisor, "_LAST_MESSAGE_S", 60.0)

    async def test() -> None:
        world.begin()
        world.processes[0].exit(0)
        await asyncio.sleep(0.05)
        world.processes[0].say(EngineDead(reason="the device is on fire"))
        assert (await world.hears(EngineDead)).reason == "the device is on fire"
        await world.hears(EngineReady)
        # A killed process sends no last message, and the supervisor waits for none.
        world.processes[1].exit(-9)
        assert "SIGKILL" in (await asyncio.wait_for(world.hears(EngineDead), 30)).reason

    world.run(test)


def test_a_loop_that_is_busy_is_waited_for(world: World) -> None:
    async def test() -> None:
        world.begin()
        world.processes[0].exit(-9)
        time.sleep(1.2)
        assert (await world.hears(EngineDead)).retry_after_s == 1
        await world.hears(EngineReady)

    world.run(test)


def test_a_start_that_failed_before_another_succeeded_is_forgotten(world: World) -> None:
    async def test() -> None:
        supervisor = world.begin(max_restarts=2)
        world.outcome = EngineDeadError("killed")
        supervisor._is_closing.wait = lambda pause_s: setattr(
            world, "outcome", None if pause_s else world.outcome
        )
        world.processes[0].exit(-9)
        await world.hears(EngineDead)
        await world.hears(EngineReady)
        assert len(world.processes) == 3
        await asyncio.to_thread(supervisor.close)
        assert (await world.hears(EngineDead)).reason == "it was shut down"

    world.run(test)


def test_an_engine_that_is_given_up_is_killed_once(world: World) -> None:
    async def test() -> None:
        supervisor = world.begin()
        first = world.processes[0]
        for reason in ("no use", "still none"):
            supervisor.give_up(reason)
        first.say("late")
        assert first.calls == ["kill"]
        first.exit(-9)
        assert await world.hears(EngineDead) == EngineDead(reason="no use", retry_after_s=1)
        await world.hears(EngineReady)

    world.run(test)


def test_each_engine_has_a_trace_of_its_own_and_all_else_of_the_first(world: World) -> None:
    async def test() -> None:
        config = EngineConfig(scheduler=SchedulerConfig(trace_file="t"))
        world.begin(config=config, max_restarts=2)
        for _ in range(2):
            world.processes[-1].exit(-9)
            await world.hears(EngineDead)
            await world.hears(EngineReady)
        configs = [process.config for process in world.processes]
        files = [config.scheduler.trace_file for config in configs]
        assert files == ["t", "t.restart-1", "t.restart-2"]
        assert {config.cache.num_gpu_blocks_override for config in configs[1:]} == {10}
        assert {config.model.max_model_len for config in configs[1:]} == {64}
        first, *later = [process.settings for process in world.processes]
        assert first["environment"] == {"REPLICA": "1"} and first["max_idle_start_s"] == 90.0
        # Only the first start draws a progress bar.
        assert first["show_progress"] and later == [first | {"show_progress": False}] * 2

    world.run(test)


def test_a_supervisor_that_fails_itself_says_so_and_ends_its_engine(world: World) -> None:
    async def test() -> None:
        supervisor = world.begin(max_restarts=9)
        world.processes[0].exit(RuntimeError("nobody knows"))
        dead = await world.hears(EngineDead)
        assert dead == EngineDead(reason="RuntimeError: nobody knows")
        assert world.processes[0].calls == ["end"] and len(world.processes) == 1
        supervisor._thread.join(60)
        assert world.heard == []

    world.run(test)


def test_an_engine_ends_with_a_loop_that_is_closed_without_it(world: World) -> None:
    async def test() -> EngineSupervisor:
        return world.begin(max_restarts=9)

    supervisor = asyncio.run(test())
    world.processes[0].exit(-9)
    supervisor._thread.join(60)
    assert not supervisor._thread.is_alive()
    assert "end" in world.processes[0].calls
    assert world.heard == [] and len(world.processes) == 1


def test_one_whose_end_is_wanted_is_the_last(world: World) -> None:
    async def test() -> None:
        supervisor = world.begin(max_restarts=9)
        supervisor.send(Shutdown(drain=True))
        assert world.processes[0].calls == [Shutdown(drain=True)]
        world.processes[0].exit(0)
        assert await world.hears(EngineDead) == EngineDead(reason="it was shut down")
        await asyncio.to_thread(supervisor.close)
        assert world.heard == [] and len(world.processes) == 1

    world.run(test)


def test_close_waits_for_the_supervising_thread_and_works_before_the_start(world: World) -> None:
    async def test() -> None:
        supervisor = world.begin(max_restarts=9)
        await asyncio.to_thread(supervisor.close)
        assert not supervisor._thread.is_alive()
        assert world.processes[0].calls == ["end", "release"]

    world.run(test)
    # One whose start has failed has no loop yet.
    EngineSupervisor(
        EngineConfig(),
        RestartPolicy(max_restarts=9, window_s=60.0),
        max_step_s=0.0,
        max_idle_start_s=0.0,
    ).close()
    assert world.processes[1].calls == ["end", "release"]
