"""`PrefixRequestRouter`: Ray Serve's requests are routed by paxkv's `PrefixRouter`."""

import time
from collections import OrderedDict
from collections.abc import Sequence

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from paxkv.fleet.prefix_router import PrefixRouter

# Names of keyword arguments of requests, which the router reads.
CHAIN, AVOID = "chain", "avoid"
# Key of a replica's metadata.
CACHE_TOKENS = "cache_tokens"
# A request that has a replica but was not sent for this long was cancelled before it was sent.
_UNSENT_S = 60.0


class PrefixRequestRouter(RequestRouter):
    """Sends a request to the replica that has received its prompt before, unless that is too busy.

    Each process that sends requests has a router. A router knows only the prompts that it has sent.
    It counts its own requests. Numbers that replicas report show the requests of other routers.
    """

    def initialize_state(self, **_settings: object) -> None:
        """Called by Ray Serve before the first request."""
        self._prefixes = PrefixRouter[str]()
        # Request id -> the replica that it was sent to.
        self._placed: dict[str, str] = {}
        self._unsent: OrderedDict[str, float] = OrderedDict()
        self._num_own: dict[str, int] = {}
        self._num_of_others: dict[str, int] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Ray Serve when replicas have started or ended."""
        super().update_replicas(replicas)
        found = {replica.replica_id.unique_id: replica for replica in replicas}
        for key in set(self._prefixes) - found.keys():
            self._remove(key)
        for key, replica in found.items():
            if key not in self._prefixes:
                self._prefixes.add(key, replica.replica_metadata.get(CACHE_TOKENS, 0))
                self._update_load(key)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._remove(replica_id.unique_id)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> Sequence[Sequence[RunningReplica]]:
        """Ranks the replicas: the chosen one, then all others."""
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if pending_request is None or not any(key in self._prefixes for key in replicas):
            return [candidate_replicas]
        # Without this, Ray would call again immediately if all replicas reject the request.
        pending_request.routing_context.should_backoff = True
        self._forget_cancelled()
        arguments = pending_request.kwargs
        chain = arguments.get(CHAIN, ())
        avoided = set(arguments.get(AVOID, ()))
        chosen = self._prefixes.choose(
            chain, avoid=avoided | {key for key in self._prefixes if key not in replicas}
        )
        if chosen not in replicas:
            return [candidate_replicas]
        self._prefixes.record(chosen, chain)
        request_id = pending_request.metadata.internal_request_id
        self._place(request_id, chosen)
        self._unsent[request_id] = time.monotonic()
        self._unsent.move_to_end(request_id)
        others = [replica for key, replica in replicas.items() if key != chosen]
        # Replicas to avoid come last.
        others.sort(key=lambda replica: replica.replica_id.unique_id in avoided)
        return [[replicas[chosen]], *([replica] for replica in others)]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        """Called by Ray Serve when a replica has accepted a request."""
        request_id = pending_request.metadata.internal_request_id
        self._unsent.pop(request_id, None)
        if self._placed.get(request_id) == replica_id.unique_id:
            return
        # The chosen replica rejected the request.
        self._place(request_id, replica_id.unique_id)
        if replica_id.unique_id in self._prefixes:
            self._prefixes.record(replica_id.unique_id, pending_request.kwargs.get(CHAIN, ()))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called by Ray Serve when a request has ended, or was rejected."""
        if self._placed.get(internal_request_id) == replica_id.unique_id:
            self._unplace(internal_request_id)

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        """Called by Ray Serve with the number of requests that a replica reported."""
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        key = replica_id.unique_id
        self._num_of_others[key] = max(0, num_ongoing_requests - self._num_own.get(key, 0))
        self._update_load(key)

    def _place(self, request_id: str, key: str) -> None:
        self._unplace(request_id)
        self._placed[request_id] = key
        self._num_own[key] = self._num_own.get(key, 0) + 1
        self._update_load(key)

    def _unplace(self, request_id: str) -> None:
        self._unsent.pop(request_id, None)
        key = self._placed.pop(request_id, None)
        if key in self._num_own:
            self._num_own[key] -= 1
            self._update_load(key)

    def _forget_cancelled(self) -> None:
        limit_s = time.monotonic() - _UNSENT_S
        while self._unsent and next(iter(self._unsent.values())) < limit_s:
            self._unplace(next(iter(self._unsent)))

    def _remove(self, key: str) -> None:
        self._prefixes.remove(key)
        self._num_own.pop(key, None)
        self._num_of_others.pop(key, None)

    def _update_load(self, key: str) -> None:
        if key in self._prefixes:
            num_requests = self._num_own.get(key, 0) + self._num_of_others.get(key, 0)
            self._prefixes.set_num_requests(key, num_requests)
