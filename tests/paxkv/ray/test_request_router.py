"""Routing in Ray Serve's terms: its hooks keep the load of each replica right."""

import asyncio
import dataclasses
from types import SimpleNamespace

import pytest

pytest.importorskip("ray.serve", reason="needs the extra `ray`")

from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID

from paxkv.fleet.prompt_digest import digest_chain
from paxkv.ray import request_router
from paxkv.ray.request_router import PrefixRequestRouter

DEPLOYMENT = DeploymentID(name="engines")
CHAIN = digest_chain(b"", bytes(640))


@dataclasses.dataclass
class FakeReplica:
    """What the router reads of a replica."""

    key: str
    replica_metadata: dict = dataclasses.field(default_factory=lambda: {"cache_tokens": 10_000})
    max_ongoing_requests = 5

    @property
    def replica_id(self) -> ReplicaID:
        return ReplicaID(unique_id=self.key, deployment_id=DEPLOYMENT)

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0


def make_request(request_id: str, chain: list[int], avoid: tuple[str, ...] = ()) -> object:
    return SimpleNamespace(
        kwargs={"chain": chain, "avoid": list(avoid)},
        metadata=SimpleNamespace(internal_request_id=request_id),
        routing_context=SimpleNamespace(should_backoff=False),
    )


class Routed:
    """A router with replicas a, b and c."""

    def __init__(self) -> None:
        self.replicas = [FakeReplica(key) for key in "abc"]
        self.router = PrefixRequestRouter(
            deployment_id=DEPLOYMENT, handle_source=DeploymentHandleSource.REPLICA
        )
        self.router.initialize_state()
        self.router.update_replicas(self.replicas)

    async def choose(self, request_id: str, chain: list[int] = CHAIN, **settings: object) -> str:
        """The ids of the replicas, in the order in which they are tried."""
        ranks = await self.router.choose_replicas(
            self.router._replicas_list, make_request(request_id, chain, **settings)
        )
        return "".join(replica.key for rank in ranks for replica in rank)

    def route(self, request_id: str, key: str) -> None:
        replica_id = FakeReplica(key).replica_id
        self.router.on_request_routed(make_request(request_id, CHAIN), replica_id, None)

    def complete(self, request_id: str, key: str) -> None:
        self.router.on_request_completed(FakeReplica(key).replica_id, request_id)


def run(check: object) -> None:
    async def with_router() -> None:
        await check(Routed())

    asyncio.run(with_router())


def test_load_counts_from_the_choice_to_the_end() -> None:
    async def check(routed: Routed) -> None:
        assert [(await routed.choose(name))[0] for name in "1234"] == ["a", "b", "c", "a"]
        routed.route("2", "b")
        # Replica b is idle again.
        routed.complete("2", "b")
        assert (await routed.choose("5"))[0] == "b"
        # A completion that the router does not know changes nothing.
        routed.complete("6", "c")
        assert (await routed.choose("7", []))[0] in "bc"

    run(check)


def test_a_second_choice_for_a_request_moves_it() -> None:
    async def check(routed: Routed) -> None:
        assert (await routed.choose("1"))[0] == "a"
        assert (await routed.choose("1", avoid=("a",)))[0] == "b"
        # Replica a has no request now.
        assert (await routed.choose("2", []))[0] == "a"

    run(check)


def test_a_rejected_request_counts_at_the_replica_that_accepted_it() -> None:
    async def check(routed: Routed) -> None:
        assert (await routed.choose("1")) == "abc"
        routed.route("1", "c")
        routed.complete("1", "a")
        assert [(await routed.choose(name, []))[0] for name in "234"] == ["a", "b", "a"]
        routed.complete("1", "c")
        assert (await routed.choose("5", []))[0] == "c"

    run(check)


def test_requests_of_other_routers_count() -> None:
    async def check(routed: Routed) -> None:
        routed.router.on_new_queue_len_info(FakeReplica("a").replica_id, 3)
        routed.router.on_new_queue_len_info(FakeReplica("b").replica_id, 1)
        assert [(await routed.choose(name, []))[0] for name in "123"] == ["c", "b", "c"]

    run(check)


def test_avoided_replicas_come_last_and_dead_ones_not_at_all() -> None:
    async def check(routed: Routed) -> None:
        assert await routed.choose("1", avoid=("a",)) == "bca"
        routed.router.on_replica_actor_died(FakeReplica("c").replica_id)
        assert await routed.choose("2") == "ab"
        routed.router.update_replicas([FakeReplica("d")])
        assert await routed.choose("3") == "d"
        # The requests of removed replicas end.
        routed.complete("1", "b")
        routed.complete("2", "a")

    run(check)


def test_cancelled_requests_do_not_count_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(routed: Routed) -> None:
        monkeypatch.setattr(request_router, "_UNSENT_S", 0.0)
        # No request was sent, so each choice finds idle replicas.
        assert [(await routed.choose(name, []))[0] for name in "1234"] == ["a"] * 4

    run(check)
