"""Replicas as one engine: where requests go, who hears of a death, and what all have counted."""

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

from paxkv.config.sampling_params import SamplingParams
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
from paxkv.fleet.replica_prefixes import prompt_chain
from paxkv.fleet.stats_sum import COUNTERS
from paxkv.server.metrics.engine_totals import EngineTotals
from tests.paxkv.client.fake_replicas import FakeReplica, Replicas, ready_engine, request


def test_the_length_and_its_reason_are_those_of_the_shortest_replica() -> None:
    use = FeatureUse(name="full_context", is_used=True, detail="all of it")
    short = FeatureUse(name="full_context", is_used=False, detail="no room")
    readies = [
        ready_engine(max_model_len=64, feature_uses=(use,)),
        ready_engine(max_model_len=48, feature_uses=(short,)),
    ]
    info = DataParallelTransport([(FakeReplica(), ready) for ready in readies]).ready.model_info
    assert (info.max_model_len, info.feature_uses) == (48, (short,))


def test_a_replica_without_progress_gets_no_requests_while_another_makes_progress() -> None:
    replicas = Replicas(3)
    first, second, third = replicas.engines
    assert replicas.add("a") == 0
    first.stall = "no step"
    # The first has one request; the others get more than that.
    assert [replicas.add(name) for name in "bcdef"] == [1, 2, 1, 2, 1]
    assert replicas.transport.stall is None
    replicas.die(1)
    assert replicas.transport.stall is None
    third.stall = "no step either"
    assert replicas.transport.stall == "replica 0: no step replica 2: no step either"
    # All wait: the requests are spread as ever.
    assert replicas.add("g") == 0
    replicas.restart(1, 5.0)
    assert replicas.transport.stall is None
    assert replicas.add("h") == 1
    second.stall = third.stall = first.stall = None
    replicas.die(0), replicas.die(1), replicas.die(2)
    # The client reports the end of the engines instead.
    assert replicas.transport.stall is None


class RoutingMachine(RuleBasedStateMachine):
    """Against a model that knows where everybody is."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.replicas = Replicas()
        self.running: list[set[str]] = [set() for _ in self.replicas.engines]
        self.is_dead = [False] * len(self.running)
        self.ids = itertools.count()
        # How far each engine has counted, all in its place have, and what Prometheus has seen.
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
        # A short prompt says nothing, and no other outweighs more than these.
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
        """Asks all for their numbers; one may die before it answers."""
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
            told = [i for message in engine.take(AbortRequests) for i in message.request_ids]
            assert set(told) == self.running[idx] & set(request_ids)
            self.running[idx] -= set(told)

    @rule(idx=st.integers(0, 2), is_noticed_first=st.booleans())
    def die(self, idx: int, is_noticed_first: bool) -> None:
        if self.is_dead[idx]:
            return
        self.is_dead[idx] = True
        if is_noticed_first and not all(self.is_dead):
            # By a request, which goes to another.
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
        told = [isinstance(message, EngineReady) for message in self.replicas.heard]
        assert told == ([True] if all(self.is_dead) else [])
        assert self.replicas.engines[idx].take(Shutdown) == []
        self.is_dead[idx] = False
        # Another engine, which has counted nothing.
        self.counts[idx] = 0
        self.num_restarts[idx] += 1

    def stats_of(self, idx: int) -> SchedulerStats:
        counters = dict.fromkeys(COUNTERS, self.counts[idx]) | {"num_replaced_engines": 0}
        return SchedulerStats(num_blocks=10, engine_start_time=self.start_times[idx], **counters)

    @invariant()
    def nobody_is_forgotten(self) -> None:
        replicas = self.replicas.transport._replicas
        assert [set(replica.requests) for replica in replicas] == self.running

    def teardown(self) -> None:
        self.replicas.transport.close()
        assert all(engine.sent[-1] == "closed" for engine in self.replicas.engines)


TestRouting = RoutingMachine.TestCase


def test_kept_blocks_draw_forks_until_they_are_given_up() -> None:
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


def test_a_prompt_goes_to_where_its_beginning_was_sent_unless_that_one_is_busier() -> None:
    replicas = Replicas(2)
    first, second = ([token] * 64 for token in (1, 2))
    assert replicas.add("a", prompt_token_ids=first) == 0
    assert replicas.add("b", prompt_token_ids=second) == 1
    assert replicas.add("c", prompt_token_ids=second) == 1
    # A conversation goes on, and the other has fewer requests.
    assert replicas.add("d", prompt_token_ids=second + [3] * 64) == 1
    assert [replicas.add(name, prompt_token_ids=second) for name in "ef"] == [0, 0]
    # Both have it now, and the beginning alone does not outweigh the rest.
    assert replicas.add("g", prompt_token_ids=second + [3] * 64) == 1
    assert replicas.add("h", prompt_token_ids=second) == 0
    more = [replicas.add(name, prompt_token_ids=second + [3] * 64) for name in "ijkl"]
    assert more == [1, 1, 1, 0]


def test_a_replica_with_nothing_to_do_gets_a_prompt_that_another_knows() -> None:
    replicas = Replicas()
    chat = [[9] * 64 + [token] * 16 for token in range(4)]
    # All begin alike, and yet few at a time are enough to use every replica.
    assert [replicas.add(str(idx), prompt_token_ids=chat[idx]) for idx in range(3)] == [0, 1, 2]
    replicas.transport.send(AbortRequests(request_ids=["2"]))
    assert replicas.add("again", prompt_token_ids=chat[1]) == 2


def test_a_fork_stays_where_its_blocks_are_and_its_prompt_is_not_looked_at() -> None:
    replicas = Replicas(2)
    assert replicas.add("a", keep_blocks=True) == 0
    # Never sent: whatever would look at this prompt fails.
    assert replicas.add("b", fork_from="a", prompt_token_ids=None) == 0
    assert replicas.add("c", prompt_token_ids=[5] * 64) == 1


@pytest.mark.parametrize("is_reset", [True, False])
def test_a_reset_that_was_refused_is_none(is_reset: bool) -> None:
    replicas = Replicas(2)
    replicas.add("a")
    assert replicas.add("b", prompt_token_ids=[5] * 64) == 1
    answer = UtilityReply(call_id=3, result_json="true" if is_reset else "false")
    replicas.call("reset_prefix_cache", [answer] * 2)
    assert replicas.add("c", prompt_token_ids=[5] * 64) == (0 if is_reset else 1)


@pytest.mark.parametrize("what", ["death", "no cache"])
def test_a_prompt_that_cannot_be_cached_goes_to_the_first_of_equally_busy_ones(what: str) -> None:
    replicas = Replicas(2, have_prefix_caches=what != "no cache")
    replicas.add("a")
    assert replicas.add("b", prompt_token_ids=[5] * 64) == 1
    if what == "death":
        replicas.die(1)
        replicas.restart(1, 1.0)
    replicas.transport.send(AbortRequests(request_ids=["a", "b"]))
    assert replicas.add("c", prompt_token_ids=[5] * 64) == 0


def test_calls_are_answered_for_all() -> None:
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
    told = msgspec.json.decode(replicas.call("get_stats", answers).result_json, type=SchedulerStats)
    assert (told.num_running_reqs, told.num_blocks, told.num_steps) == (3, 40, 9)
    assert told.kv_cache_usage == pytest.approx(0.2)
    answers = [reply(None, "unknown request"), reply('{"a": 1}')]
    assert replicas.call("explain_prefix_cache_miss", answers).result_json == '{"a": 1}'
    answers = [reply(None, "unknown here"), reply(None, "nor here")]
    assert replicas.call("explain_prefix_cache_miss", answers).error == "unknown here"
    assert replicas.call("check_invariants", [reply("null"), reply(None, "bad")]).error == "bad"
    assert replicas.call("check_invariants", [reply("null")] * 2).result_json == "null"
    # Of one that cannot say, what it said last.
    answers = [reply(None, "bad"), reply(msgspec.json.encode(stats[0]).decode())]
    told = msgspec.json.decode(replicas.call("get_stats", answers).result_json, type=SchedulerStats)
    assert (told.num_blocks, told.num_steps) == (20, 8)


def test_a_call_is_answered_when_those_who_owe_an_answer_die() -> None:
    replicas = Replicas(2)
    replicas.transport.send(UtilityCall(call_id=1, method="start_profile", arguments=("/p",)))
    folders = [engine.take(UtilityCall)[0].arguments for engine in replicas.engines]
    assert folders == [("/p/replica-0",), ("/p/replica-1",)]
    replicas.engines[1].say(UtilityReply(call_id=1, result_json="true"))
    replicas.die(0)
    assert replicas.heard == [UtilityReply(call_id=1, result_json="true")]
    # Alone, the second is asked what the first was asked before.
    replicas.transport.send(UtilityCall(call_id=2, method="inspect"))
    replicas.heard.clear()
    replicas.die(1)
    # And of all calls that wait, the client tells their callers.
    (dead,) = replicas.heard
    assert (dead.retry_after_s, dead.request_ids) == (5, None)
    with pytest.raises(EngineDeadError):
        replicas.transport.send(UtilityCall(call_id=3, method="inspect"))
    with pytest.raises(EngineDeadError):
        replicas.add("late")
    # Nobody asks the next ones for it.
    replicas.heard.clear()
    for idx in range(2):
        replicas.restart(idx, 1.0)
    replicas.die(1)
    assert [type(message) for message in replicas.heard] == [EngineReady]


def test_a_prompt_that_reads_no_cache_goes_by_load_and_is_known_from_then_on() -> None:
    replicas = Replicas(2)
    replicas.add("a")
    prompt = {"prompt_token_ids": [5] * 64}
    unread = prompt | {"sampling_params": SamplingParams(prompt_logprobs=0)}
    assert [replicas.add("b", **unread), replicas.add("c", **prompt)] == [1, 1]
    assert replicas.add("d", **unread) == 0


def test_as_much_is_remembered_of_a_successor_as_its_cache_has_room_for() -> None:
    replicas = Replicas(2)
    replicas.add("a")
    replicas.die(1)
    replicas.engines[1].is_dead = False
    replicas.engines[1].say(ready_engine(1.0, max_fitting_tokens=2048))
    # More than 512 tokens, which its predecessor had room for.
    prompt = list(range(1024))
    assert replicas.add("b", prompt_token_ids=prompt) == 1
    prefixes = replicas.transport._replicas[1].prefixes
    assert prefixes.num_known(prompt_chain(request("c", prompt_token_ids=prompt))) == 64


def test_a_call_is_answered_though_whom_it_goes_to_has_just_ended() -> None:
    replicas = Replicas(2)
    replicas.engines[0].is_dead = True
    replicas.transport.send(UtilityCall(call_id=4, method="inspect"))
    (reply,) = replicas.heard
    assert (reply.call_id, reply.error) == (4, "the called engine has ended.")


def test_client_hears_of_the_end_when_no_replica_will_come_back() -> None:
    replicas = Replicas(2)
    replicas.transport.send(Shutdown(drain=True))
    assert [engine.take(Shutdown) for engine in replicas.engines] == [[Shutdown(drain=True)]] * 2
    replicas.die(0, retry_after_s=None)
    assert replicas.heard == []
    replicas.die(1, retry_after_s=None)
    (dead,) = replicas.heard
    assert (dead.retry_after_s, dead.request_ids) == (None, None)


def test_client_is_told_to_wait_for_the_first_that_comes_back_and_what_that_can_do() -> None:
    replicas = Replicas(2)
    replicas.die(0, retry_after_s=4)
    replicas.die(1, retry_after_s=9)
    # A start has failed, and the other goes on.
    replicas.die(1, retry_after_s=None)
    (dead,) = replicas.heard
    assert dead.retry_after_s == 4
    replicas.engines[0].say(ready_engine(1.0, max_model_len=32))
    assert replicas.heard[1].model_info.max_model_len == 32
    assert replicas.heard[1].stats.num_blocks == 10


def test_client_hears_of_the_end_when_the_last_start_has_failed() -> None:
    replicas = Replicas(2)
    for idx in (0, 1):
        replicas.die(idx)
    replicas.heard.clear()
    replicas.die(0, retry_after_s=None)
    assert replicas.heard == []
    replicas.die(1, retry_after_s=None)
    (dead,) = replicas.heard
    assert (dead.retry_after_s, dead.request_ids) == (None, None)


def test_a_call_that_is_answered_while_it_is_sent_is_answered_once() -> None:
    replicas = Replicas(2)
    reply = UtilityReply(call_id=3, result_json="true")
    for engine in replicas.engines:
        engine.send = lambda call, engine=engine: engine.say(reply)
    replicas.transport.send(UtilityCall(call_id=3, method="reset_prefix_cache"))
    assert replicas.heard == [reply]
    assert not any(engine.is_dead for engine in replicas.engines)


def test_how_much_busier_a_replica_with_a_prompts_beginning_may_be_is_a_part() -> None:
    replicas = Replicas(2)
    for number in range(40):
        replicas.add(str(number))
    places = [replicas.add(f"known{n}", prompt_token_ids=[5] * 64) for n in range(7)]
    # The first of them is the 21st there; 20 and a quarter of them are 25, which may have one more.
    assert places == [0] * 6 + [1]


def test_one_that_takes_no_message_any_more_is_left_out_until_it_has_said_why() -> None:
    replicas = Replicas(2)
    replicas.engines[0].is_dead = True
    assert {replicas.add(f"r{number}") for number in range(3)} == {1}
    replicas.transport.send(UtilityCall(call_id=4, method="get_stats"))
    stats = SchedulerStats(num_running_reqs=3, num_blocks=10)
    stats_json = msgspec.json.encode(stats).decode()
    replicas.engines[1].say(UtilityReply(call_id=4, result_json=stats_json))
    (reply,) = replicas.heard
    told = msgspec.json.decode(reply.result_json, type=SchedulerStats)
    assert told.num_running_reqs == 3
    # It had no request, so nobody needs to hear of it.
    replicas.die(0)
    assert replicas.heard == [reply]


def test_a_step_that_the_client_cannot_use_ends_the_requests_that_ended_with_it() -> None:
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


def test_one_that_comes_back_while_all_are_to_end_hears_of_it() -> None:
    replicas = Replicas(2)
    replicas.die(0)
    replicas.transport.send(Shutdown(drain=True))
    replicas.restart(0, 5.0)
    assert replicas.engines[0].take(Shutdown) == [Shutdown()]


def test_what_cannot_be_used_ends_its_replica_alone() -> None:
    replicas = Replicas(3)
    idx = replicas.add("r")
    # Nobody asked.
    replicas.engines[idx].say(UtilityReply(call_id=77, result_json="true"))
    (dead,) = replicas.heard
    assert "not asked to" in dead.reason and dead.request_ids == ("r",)
    assert [engine.is_dead for engine in replicas.engines].count(True) == 1
    # Nor could the client use this.
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


def test_what_clients_may_ask_for_is_what_every_replica_can_do() -> None:
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


def test_close_on_the_loops_own_thread_does_not_wait_for_itself() -> None:
    replicas = Replicas(2)
    transport = LoopThread(replicas.transport)
    transport._loop.call_soon_threadsafe(transport.close)
    transport._thread.join(60)
    assert not transport._thread.is_alive()
    # All end their steps at the same time.
    assert [engine.sent for engine in replicas.engines] == [[Shutdown(), "closed"]] * 2


def test_expert_tokens_of_each_replica_go_on_after_a_restart() -> None:
    replicas = Replicas(2)

    def step(idx: int, start_time: float, **fields: object) -> list[dict[int, tuple[int, ...]]]:
        stats = SchedulerStats(engine_start_time=start_time, **fields)
        replicas.engines[idx].say(
            StepOutputs(outputs=[], stats=stats, timestamp=0.0, monotonic_s=0.0)
        )
        return [engine.expert_tokens for engine in replicas.heard[-1].stats.engines]

    assert step(0, 1.0, expert_tokens={3: (5, 0)}) == [{3: (5, 0)}, {}]
    # Steps that leave them out do not reset them.
    assert step(0, 1.0) == step(1, 1.0) == [{3: (5, 0)}, {}]
    replicas.die(0)
    replicas.restart(0, 9.0)
    assert step(0, 9.0) == [{3: (5, 0)}, {}]
    assert step(0, 9.0, expert_tokens={3: (1, 2)}) == [{3: (6, 2)}, {}]
    assert step(0, 9.0) == [{3: (6, 2)}, {}]
