"""Replicas as one engine: routing of requests, deaths and restarts, merged statistics."""

import itertools

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
)

from paxkv.contracts.engine_output import (
    EngineCoreOutput,
    EngineDead,
    SchedulerStats,
    StepOutputs,
    UtilityReply,
)
from paxkv.contracts.engine_request import AbortRequests, AddRequest, Shutdown, UtilityCall
from paxkv.contracts.engine_start import EngineReady, FeatureUse
from paxkv.errors import EngineDeadError
from paxkv.fleet.data_parallel import DataParallelTransport
from paxkv.fleet.loop_thread import LoopThread
from paxkv.fleet.prompt_digest import prompt_chain
from paxkv.fleet.stats_sum import COUNTERS
from paxkv.server.metrics.engine_totals import EngineTotals
from tests.paxkv.client.fake_replicas import FakeReplica, Replicas, ready_engine, request


def test_max_model_len_and_its_reason_come_from_the_shortest_replica() -> None:
    use = FeatureUse(name="full_context", is_used=True, detail="all of it")
    short = FeatureUse(name="full_context", is_used=False, detail="no room")
    readies = [
        ready_engine(max_model_len=64, feature_uses=(use,)),
        ready_engine(max_model_len=48, feature_uses=(short,)),
    ]
    info = DataParallelTransport([(FakeReplica(), ready) for ready in readies]).ready.model_info
    assert (info.max_model_len, info.feature_uses) == (48, (short,))


class RoutingMachine(RuleBasedStateMachine):
    """Compares random operations with a model that knows the replica of every request."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.replicas = Replicas()
        self.running: list[set[str]] = [set() for _ in self.replicas.engines]
        self.is_dead = [False] * len(self.running)
        self.ids = itertools.count()
        # Counters of each engine, of all engines of each replica, and as Prometheus sees them.
        self.counts = [0] * len(self.running)
        self.num_counted = [0] * len(self.running)
        self.num_restarts = [0] * len(self.running)
        self.start_times = [0.0] * len(self.running)
        self.new_start_times = itertools.count(1)
        self.totals = EngineTotals()

    def place(self, request_id: str) -> int | None:
        places = [idx for idx, ids in enumerate(self.running) if request_id in ids]
        return places[0] if places else None

    @precondition(lambda self: not all(self.is_dead))
    @rule(target=requests, kind=st.integers(0, 2), num_chunks=st.integers(0, 2))
    def add(self, kind: int, num_chunks: int) -> str:
        request_id = str(next(self.ids))
        least = min(len(r) for r, dead in zip(self.running, self.is_dead, strict=True) if not dead)
        # A prompt too short for a chunk goes to a least busy replica.
        most = least + max(min(least, 2), least // 4) if num_chunks else least
        idx = self.replicas.add(request_id, prompt_token_ids=[kind] * (16 * num_chunks + 1))
        assert not self.is_dead[idx] and len(self.running[idx]) <= most
        self.running[idx].add(request_id)
        return request_id

    @precondition(lambda self: not all(self.is_dead))
    @rule(target=requests, source=requests)
    def fork(self, source: str) -> str:
        request_id, place = str(next(self.ids)), self.place(source)
        idx = self.replicas.add(request_id, fork_from=source)
        assert idx == place or (place is None and not self.is_dead[idx])
        self.running[idx].add(request_id)
        return request_id

    @rule(request_id=consumes(requests))
    def end(self, request_id: str) -> None:
        idx = self.place(request_id)
        if idx is None:
            return
        self.running[idx].remove(request_id)
        self.counts[idx] += 2
        self.num_counted[idx] += 2
        self.replicas.heard.clear()
        self.replicas.end(idx, request_id, self.stats_of(idx))
        (step,) = self.replicas.heard
        assert [output.request_id for output in step.outputs] == [request_id]
        assert step.engine_idx == idx
        self.check_stats(step.stats)

    @precondition(lambda self: not all(self.is_dead))
    @rule(dying=st.none() | st.integers(0, 2))
    def scrape(self, dying: int | None) -> None:
        """Gets the statistics of all replicas; one may die before it replies."""
        if dying is not None and (self.is_dead[dying] or self.is_dead.count(False) == 1):
            return
        self.replicas.transport.send(UtilityCall(call_id=9, method="get_stats"))
        for idx, engine in enumerate(self.replicas.engines):
            if idx != dying and engine.take(UtilityCall):
                stats = msgspec.json.encode(self.stats_of(idx)).decode()
                engine.say(UtilityReply(call_id=9, result_json=stats))
        if dying is not None:
            self.die(dying, False)
        (reply,) = [m for m in self.replicas.heard if isinstance(m, UtilityReply)]
        self.replicas.heard.clear()
        self.check_stats(msgspec.json.decode(reply.result_json, type=SchedulerStats))

    def check_stats(self, stats: SchedulerStats) -> None:
        seen = self.totals.update(stats)
        assert self.totals.num_restarts == 0
        for one, num_counted, num_restarts, num_alive in (
            (seen, sum(self.num_counted), sum(self.num_restarts), self.is_dead.count(False)),
            *zip(
                seen.engines,
                self.num_counted,
                self.num_restarts,
                [not dead for dead in self.is_dead],
                strict=True,
            ),
        ):
            counters = {name: getattr(one, name) for name in COUNTERS}
            assert counters.pop("num_replaced_engines") == num_restarts
            assert set(counters.values()) == {num_counted}
            assert one.num_blocks == 10 * num_alive
        assert [one.engine_start_time for one in seen.engines] == self.start_times

    @rule(request_ids=st.lists(consumes(requests), min_size=1))
    def abort(self, request_ids: list[str]) -> None:
        self.replicas.transport.send(AbortRequests(request_ids=request_ids))
        for idx, engine in enumerate(self.replicas.engines):
            aborted = [i for message in engine.take(AbortRequests) for i in message.request_ids]
            assert set(aborted) == self.running[idx] & set(request_ids)
            self.running[idx] -= set(aborted)

    @rule(idx=st.integers(0, 2), is_noticed_first=st.booleans())
    def die(self, idx: int, is_noticed_first: bool) -> None:
        if self.is_dead[idx]:
            return
        self.is_dead[idx] = True
        if is_noticed_first and not all(self.is_dead):
            # A send to the dead engine fails, so the request goes to another replica.
            self.replicas.engines[idx].is_dead = True
            request_id = str(next(self.ids))
            place = self.replicas.add(request_id)
            assert not self.is_dead[place]
            self.running[place].add(request_id)
        self.replicas.heard.clear()
        self.replicas.die(idx)
        deaths = [message for message in self.replicas.heard if isinstance(message, EngineDead)]
        if all(self.is_dead):
            (dead,) = deaths
            assert (dead.retry_after_s, dead.request_ids) == (5, None)
        elif self.running[idx]:
            (dead,) = deaths
            assert set(dead.request_ids) == self.running[idx]
            assert dead.retry_after_s == 1
        else:
            assert deaths == []
        self.running[idx] = set()

    @rule(idx=st.integers(0, 2))
    def restart(self, idx: int) -> None:
        if not self.is_dead[idx]:
            return
        self.replicas.heard.clear()
        self.start_times[idx] = float(next(self.new_start_times))
        self.replicas.restart(idx, self.start_times[idx])
        are_ready = [isinstance(message, EngineReady) for message in self.replicas.heard]
        assert are_ready == ([True] if all(self.is_dead) else [])
        assert self.replicas.engines[idx].take(Shutdown) == []
        self.is_dead[idx] = False
        # The counters of the new engine are 0.
        self.counts[idx] = 0
        self.num_restarts[idx] += 1

    def stats_of(self, idx: int) -> SchedulerStats:
        counters = dict.fromkeys(COUNTERS, self.counts[idx]) | {"num_replaced_engines": 0}
        return SchedulerStats(num_blocks=10, engine_start_time=self.start_times[idx], **counters)

    @invariant()
    def replicas_hold_the_requests_of_the_model(self) -> None:
        replicas = self.replicas.transport._replicas
        assert [set(replica.requests) for replica in replicas] == self.running

    def teardown(self) -> None:
        self.replicas.transport.close()
        assert all(engine.sent[-1] == "closed" for engine in self.replicas.engines)


TestRouting = RoutingMachine.TestCase


def test_forks_go_to_the_replica_with_kept_blocks_until_they_are_aborted() -> None:
    replicas = Replicas()
    idx = replicas.add("kept", keep_blocks=True)
    replicas.end(idx, "kept", SchedulerStats())
    assert {replicas.add(f"fork{i}", fork_from="kept") for i in range(4)} == {idx}
    replicas.transport.send(AbortRequests(request_ids=["kept"]))
    assert replicas.engines[idx].take(AbortRequests) == [AbortRequests(request_ids=["kept"])]
    assert {replicas.add(f"late{i}", fork_from="kept") for i in range(4)} != {idx}
    idx = replicas.add("lost", keep_blocks=True)
    replicas.end(idx, "lost", SchedulerStats())
    replicas.die(idx)
    replicas.restart(idx, 1.0)
    replicas.transport.send(AbortRequests(request_ids=["lost"]))
    assert replicas.engines[idx].take(AbortRequests) == []


def test_fork_goes_to_its_blocks_and_its_prompt_is_not_hashed() -> None:
    replicas = Replicas(2)
    assert replicas.add("a", keep_blocks=True) == 0
    # Hashing this prompt would fail.
    assert replicas.add("b", fork_from="a", prompt_token_ids=None) == 0
    assert replicas.add("c", prompt_token_ids=[5] * 64) == 1


def test_replies_of_all_replicas_are_merged() -> None:
    replicas = Replicas(2)

    def reply(result: str | None, error: str | None = None) -> UtilityReply:
        return UtilityReply(call_id=3, result_json=result, error=error)

    for first, second, both in (("true", "true", "true"), ("true", "false", "false")):
        answers = [reply(first), reply(second)]
        assert replicas.call("reset_prefix_cache", answers).result_json == both
    stats = [
        SchedulerStats(num_running_reqs=1, kv_cache_usage=0.5, num_blocks=10, num_steps=4),
        SchedulerStats(num_running_reqs=2, kv_cache_usage=0.1, num_blocks=30, num_steps=5),
    ]
    answers = [reply(msgspec.json.encode(one).decode()) for one in stats]
    merged = msgspec.json.decode(
        replicas.call("get_stats", answers).result_json, type=SchedulerStats
    )
    assert (merged.num_running_reqs, merged.num_blocks, merged.num_steps) == (3, 40, 9)
    assert merged.kv_cache_usage == pytest.approx(0.2)
    answers = [reply(None, "unknown request"), reply('{"a": 1}')]
    assert replicas.call("explain_prefix_cache_miss", answers).result_json == '{"a": 1}'
    answers = [reply(None, "unknown here"), reply(None, "nor here")]
    assert replicas.call("explain_prefix_cache_miss", answers).error == "unknown here"
    assert replicas.call("check_invariants", [reply("null"), reply(None, "bad")]).error == "bad"
    assert replicas.call("check_invariants", [reply("null")] * 2).result_json == "null"
    # The last known statistics replace a failed reply.
    answers = [reply(None, "bad"), reply(msgspec.json.encode(stats[0]).decode())]
    merged = msgspec.json.decode(
        replicas.call("get_stats", answers).result_json, type=SchedulerStats
    )
    assert (merged.num_blocks, merged.num_steps) == (20, 8)


def test_call_completes_when_the_replicas_without_a_reply_die() -> None:
    replicas = Replicas(2)
    replicas.transport.send(UtilityCall(call_id=1, method="start_profile", arguments=("/p",)))
    folders = [engine.take(UtilityCall)[0].arguments for engine in replicas.engines]
    assert folders == [("/p/replica-0",), ("/p/replica-1",)]
    replicas.engines[1].say(UtilityReply(call_id=1, result_json="true"))
    replicas.die(0)
    assert replicas.heard == [UtilityReply(call_id=1, result_json="true")]
    # Replica 0 is dead, so replica 1 gets the call.
    replicas.transport.send(UtilityCall(call_id=2, method="inspect"))
    replicas.heard.clear()
    replicas.die(1)
    # `EngineDead` without request ids also ends the pending calls.
    (dead,) = replicas.heard
    assert (dead.retry_after_s, dead.request_ids) == (5, None)
    with pytest.raises(EngineDeadError):
        replicas.transport.send(UtilityCall(call_id=3, method="inspect"))
    with pytest.raises(EngineDeadError):
        replicas.add("late")
    # The restarted replicas owe no reply to the old calls.
    replicas.heard.clear()
    for idx in range(2):
        replicas.restart(idx, 1.0)
    replicas.die(1)
    assert [type(message) for message in replicas.heard] == [EngineReady]


def test_known_prefixes_are_limited_by_the_cache_of_the_restarted_engine() -> None:
    replicas = Replicas(2)
    replicas.add("a")
    replicas.die(1)
    replicas.engines[1].is_dead = False
    replicas.engines[1].say(ready_engine(1.0, max_fitting_tokens=2048))
    # More than the 512 tokens that fit into the first engine's cache.
    prompt = list(range(1024))
    assert replicas.add("b", prompt_token_ids=prompt) == 1
    chain = prompt_chain(request("c", prompt_token_ids=prompt))
    assert replicas.transport._router.num_known(1, chain) == 64


def test_call_to_a_replica_that_just_ended_gets_an_error_reply() -> None:
    replicas = Replicas(2)
    replicas.engines[0].is_dead = True
    replicas.transport.send(UtilityCall(call_id=4, method="inspect"))
    (reply,) = replicas.heard
    assert (reply.call_id, reply.error) == (4, "the called engine has ended.")


def test_client_receives_engine_dead_when_no_replica_will_be_restarted() -> None:
    replicas = Replicas(2)
    replicas.transport.send(Shutdown(drain=True))
    assert [engine.take(Shutdown) for engine in replicas.engines] == [[Shutdown(drain=True)]] * 2
    replicas.die(0, retry_after_s=None)
    assert replicas.heard == []
    replicas.die(1, retry_after_s=None)
    (dead,) = replicas.heard
    assert (dead.retry_after_s, dead.request_ids) == (None, None)


def test_client_is_told_the_shortest_retry_time_and_the_new_limits() -> None:
    replicas = Replicas(2)
    replicas.die(0, retry_after_s=4)
    replicas.die(1, retry_after_s=9)
    # Replica 1 cannot be restarted, but replica 0 is still starting.
    replicas.die(1, retry_after_s=None)
    (dead,) = replicas.heard
    assert dead.retry_after_s == 4
    replicas.engines[0].say(ready_engine(1.0, max_model_len=32))
    assert replicas.heard[1].model_info.max_model_len == 32
    assert replicas.heard[1].stats.num_blocks == 10


def test_client_receives_engine_dead_when_the_last_restart_has_failed() -> None:
    replicas = Replicas(2)
    for idx in (0, 1):
        replicas.die(idx)
    replicas.heard.clear()
    replicas.die(0, retry_after_s=None)
    assert replicas.heard == []
    replicas.die(1, retry_after_s=None)
    (dead,) = replicas.heard
    assert (dead.retry_after_s, dead.request_ids) == (None, None)


def test_call_with_a_reply_during_the_send_is_answered_once() -> None:
    replicas = Replicas(2)
    reply = UtilityReply(call_id=3, result_json="true")
    for engine in replicas.engines:
        engine.send = lambda call, engine=engine: engine.say(reply)
    replicas.transport.send(UtilityCall(call_id=3, method="reset_prefix_cache"))
    assert replicas.heard == [reply]
    assert not any(engine.is_dead for engine in replicas.engines)


def test_unreachable_replica_is_skipped_before_its_engine_dead_arrives() -> None:
    replicas = Replicas(2)
    replicas.engines[0].is_dead = True
    assert {replicas.add(f"r{number}") for number in range(3)} == {1}
    replicas.transport.send(UtilityCall(call_id=4, method="get_stats"))
    stats = SchedulerStats(num_running_reqs=3, num_blocks=10)
    stats_json = msgspec.json.encode(stats).decode()
    replicas.engines[1].say(UtilityReply(call_id=4, result_json=stats_json))
    (reply,) = replicas.heard
    stats = msgspec.json.decode(reply.result_json, type=SchedulerStats)
    assert stats.num_running_reqs == 3
    # Replica 0 had no requests, so the client receives no message about its death.
    replicas.die(0)
    assert replicas.heard == [reply]


def test_failure_of_the_client_in_a_step_also_ends_the_finished_requests() -> None:
    engines = [FakeReplica(), FakeReplica()]
    transport = DataParallelTransport([(engine, ready_engine()) for engine in engines])
    deaths = []

    def on_message(message: object) -> None:
        if isinstance(message, StepOutputs):
            raise ValueError("cannot be used")
        deaths.append(message)

    transport.deliver_on(None, on_message)
    transport.send(AddRequest(request=request("r")))
    output = EngineCoreOutput(request_id="r", new_token_ids=[7], finish_reason="stop")
    engines[0].say(
        StepOutputs(outputs=[output], stats=SchedulerStats(), timestamp=0.0, monotonic_s=0.0)
    )
    (dead,) = deaths
    assert dead.request_ids == ("r",)


def test_engine_that_becomes_ready_during_shutdown_is_shut_down() -> None:
    replicas = Replicas(2)
    replicas.die(0)
    replicas.transport.send(Shutdown(drain=True))
    replicas.restart(0, 5.0)
    assert replicas.engines[0].take(Shutdown) == [Shutdown()]


def test_unusable_message_ends_only_the_replica_that_sent_it() -> None:
    replicas = Replicas(3)
    idx = replicas.add("r")
    # A reply to a call that was not sent.
    replicas.engines[idx].say(UtilityReply(call_id=77, result_json="true"))
    (dead,) = replicas.heard
    assert "not asked to" in dead.reason and dead.request_ids == ("r",)
    assert [engine.is_dead for engine in replicas.engines].count(True) == 1
    # A step that the client cannot use.
    engines = [FakeReplica(), FakeReplica()]
    transport = DataParallelTransport([(engine, ready_engine()) for engine in engines])

    def on_message(message: object) -> None:
        if isinstance(message, StepOutputs):
            transport.give_up("cannot be used")

    transport.deliver_on(None, on_message)
    engines[1].say(StepOutputs(outputs=[], stats=SchedulerStats(), timestamp=0.0, monotonic_s=0.0))
    assert [engine.is_dead for engine in engines] == [False, True]
    transport.give_up("nobody knows whose")
    assert [engine.is_dead for engine in engines] == [True, True]


def test_limits_of_requests_hold_for_every_replica() -> None:
    replicas = [
        (
            FakeReplica(),
            ready_engine(max_num_seqs=8, max_fitting_tokens=tokens, max_model_len=length),
        )
        for tokens, length in ((512, 64), (400, 32))
    ]
    ready = DataParallelTransport(replicas).ready
    assert (ready.model_info.max_num_seqs, ready.model_info.max_fitting_tokens) == (16, 400)
    assert ready.model_info.max_model_len == 32
    assert ready.stats.num_blocks == 20


def test_close_on_the_thread_of_the_loop_does_not_deadlock() -> None:
    replicas = Replicas(2)
    transport = LoopThread(replicas.transport)
    transport._loop.call_soon_threadsafe(transport.close)
    transport._thread.join(60)
    assert not transport._thread.is_alive()
    # All replicas receive `Shutdown` before the first is closed.
    assert [engine.sent for engine in replicas.engines] == [[Shutdown(), "closed"]] * 2


def test_expert_tokens_of_each_replica_continue_after_a_restart() -> None:
    replicas = Replicas(2)

    def step(idx: int, start_time: float, **fields: object) -> list[dict[int, tuple[int, ...]]]:
        stats = SchedulerStats(engine_start_time=start_time, **fields)
        replicas.engines[idx].say(
            StepOutputs(outputs=[], stats=stats, timestamp=0.0, monotonic_s=0.0)
        )
        return [engine.expert_tokens for engine in replicas.heard[-1].stats.engines]

    assert step(0, 1.0, expert_tokens={3: (5, 0)}) == [{3: (5, 0)}, {}]
    # Steps without expert tokens do not reset them.
    assert step(0, 1.0) == step(1, 1.0) == [{3: (5, 0)}, {}]
    replicas.die(0)
    replicas.restart(0, 9.0)
    assert step(0, 9.0) == [{3: (5, 0)}, {}]
    assert step(0, 9.0, expert_tokens={3: (1, 2)}) == [{3: (6, 2)}, {}]
    assert step(0, 9.0) == [{3: (6, 2)}, {}]
