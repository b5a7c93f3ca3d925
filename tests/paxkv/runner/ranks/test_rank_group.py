"""The channel between the processes of an engine; here the processes are threads."""

import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import zmq

from paxkv.contracts.rank_place import RankPlace
from paxkv.errors import ConfigError, EngineDeadError
from paxkv.runner.ranks.rank_group import Follower, Leader, agree
from paxkv.runner.ranks.rank_message import Call, Join, RankMessageError, Value, encode

NUM_RANKS = 3
PATIENCE_S = 30.0


def make_places(timeout_s: float = PATIENCE_S) -> list[RankPlace]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        endpoint = f"tcp://127.0.0.1:{found.getsockname()[1]}"
    return [
        RankPlace(
            rank=rank,
            num_ranks=NUM_RANKS,
            coordinator="",
            calls_endpoint=endpoint,
            timeout_s=timeout_s,
        )
        for rank in range(NUM_RANKS)
    ]


def run_ranks(run: Callable[[Leader | Follower], object]) -> list[Future[object]]:
    """Calls `run` on every rank, and returns what it returned or raised."""

    def run_rank(place: RankPlace) -> object:
        group = (Leader if place.rank == 0 else Follower)(place)
        try:
            return run(group)
        finally:
            group.end()

    with ThreadPoolExecutor(NUM_RANKS) as threads:
        return [threads.submit(run_rank, place) for place in make_places()]


def test_followers_receive_all_calls_in_order_and_then_the_end() -> None:
    calls = [Call("run_step", idx) for idx in range(100)]

    def run(group: Leader | Follower) -> list[Call]:
        if isinstance(group, Leader):
            for call in calls:
                group.send(call)
            return calls
        found = []
        while (call := group.next_call()) is not None:
            found.append(call)
        return found

    assert [future.result() for future in run_ranks(run)] == [calls] * NUM_RANKS


def test_every_rank_gets_the_values_of_all_ranks() -> None:
    def run(group: Leader | Follower) -> list[tuple[str | int, ...]]:
        return [group.exchange("blocks", 10 * group.place.rank), group.exchange("kernels", "xla")]

    expected = [(0, 10, 20), ("xla",) * NUM_RANKS]
    assert [future.result() for future in run_ranks(run)] == [expected] * NUM_RANKS


def test_difference_is_an_error_on_every_rank_that_names_the_line() -> None:
    def run(group: Leader | Follower) -> None:
        agree(group, "programs", lambda: "jax: 1")
        agree(group, "programs", lambda: f"jax: 1\ndevice: {group.place.rank // 2}\nend")

    for future in run_ranks(run):
        with pytest.raises(ConfigError, match="Host 0 has 'device: 0', host 2 has 'device: 1'"):
            future.result()


def test_leader_ends_if_a_follower_decides_something_else() -> None:
    place = make_places()[0]
    with zmq.Context() as context:
        followers = [context.socket(zmq.DEALER) for _ in range(2)]
        for rank, (follower, name) in enumerate(
            zip(followers, ("kernels", "blocks"), strict=True), 1
        ):
            follower.identity = b"rank-%d" % rank
            follower.connect(place.calls_endpoint)
            follower.send(encode(0, Join(rank)))
            follower.send(encode(1, Value(name, 1)))
        try:
            leader = Leader(place)
            with pytest.raises(EngineDeadError, match="host 1 decides 'kernels' while .*'blocks'"):
                leader.exchange("blocks", 1)
            leader.end()
        finally:
            context.destroy(linger=0)


def test_leader_names_the_hosts_that_do_not_join() -> None:
    with pytest.raises(EngineDeadError, match=r"hosts \[1, 2\] sent no Join within 0.2 seconds"):
        Leader(make_places(timeout_s=0.2)[0])


def test_follower_does_not_wait_for_ever_at_the_start() -> None:
    follower = Follower(make_places(timeout_s=0.2)[1])
    with pytest.raises(EngineDeadError, match="did not decide 'blocks' within 0.2 seconds"):
        follower.exchange("blocks", 1)
    follower.end()


def test_damaged_call_ends_the_follower_with_a_message() -> None:
    place = make_places()[1]
    with zmq.Context() as context, context.socket(zmq.ROUTER) as leader:
        leader.linger = 0
        leader.bind(place.calls_endpoint)
        follower = Follower(place)
        name, _ = leader.recv_multipart()
        message = bytearray(encode(0, Call("draw")))
        message[-1] ^= 1
        leader.send_multipart([name, bytes(message)])
        with pytest.raises(RankMessageError, match="message 0 from the leader is damaged"):
            follower.next_call()
        follower.end()
