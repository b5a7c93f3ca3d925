"""`DataParallelTransport`: presents several engine replicas to the client as one engine."""

import asyncio
import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Sequence

import msgspec

from paxkv.contracts.engine_output import (
    EngineDead,
    EngineOutput,
    SchedulerStats,
    StepOutputs,
    UtilityReply,
)
from paxkv.contracts.engine_request import (
    AbortRequests,
    AddRequest,
    EngineInput,
    EngineRequest,
    Shutdown,
    UtilityCall,
)
from paxkv.contracts.engine_start import EngineReady
from paxkv.contracts.wire import LoopTransport
from paxkv.errors import EngineDeadError, InvariantError
from paxkv.fleet.prefix_router import PrefixRouter
from paxkv.fleet.prompt_digest import prompt_chain
from paxkv.fleet.replica import Replica
from paxkv.fleet.stats_sum import sum_stats

logger = logging.getLogger(__name__)

# The client may retry a request of a dead replica immediately: another replica computes it.
_RETRY_AFTER_S = 1
# Control calls that only the first replica answers: the inspector shows one engine.
_FIRST_REPLICA_METHODS = ("inspect", "inspect_block")


@dataclasses.dataclass(slots=True)
class _PendingCall:
    """A control call that still awaits replies from some replicas."""

    method: str
    awaited: set[int]
    replies: list[UtilityReply] = dataclasses.field(default_factory=list)


class DataParallelTransport:
    """The `LoopTransport` of several replicas: engines with the same model, each with a KV cache.

    A `PrefixRouter` chooses the replica of a request. A fork goes to the replica that has its
    blocks. Control calls go to all replicas.

    When a replica dies, the client receives an `EngineDead` with the ids of its requests, and other
    requests continue. After the last replica's death, it receives an `EngineDead` without ids.

    `send` may be called from any thread.

    Args:
        replicas: A transport per replica, with the message that its engine sent when it was ready.
        have_prefix_caches: Choose replicas by prompt prefixes.

    Source: vLLM `v1/engine/core_client.py`, its load-balancing client, which ignores prompts.
    """

    def __init__(
        self,
        replicas: Sequence[tuple[LoopTransport, EngineReady]],
        *,
        have_prefix_caches: bool = True,
    ) -> None:
        self._replicas = [Replica.from_ready(transport, ready) for transport, ready in replicas]
        self._have_prefix_caches = have_prefix_caches
        # Has the reachable replicas only.
        self._router = PrefixRouter[int]()
        for idx, (_, ready) in enumerate(replicas):
            self._router.add(idx, ready.model_info.max_fitting_tokens)
        self._calls: dict[int, _PendingCall] = {}
        self._is_closing = False
        # The replica whose message is being handled.
        self._sender_idx: int | None = None
        self._start_time = min(ready.stats.engine_start_time for _, ready in replicas)
        self._on_message: Callable[[EngineOutput | EngineReady], None] | None = None
        # The client's thread and the loop's thread use it. Reentrant: `on_message` may call `send`.
        self._lock = threading.RLock()

    @property
    def ready(self) -> EngineReady:
        """Describes all replicas as one engine."""
        readies = [replica.ready for replica in self._replicas]
        infos = [ready.model_info for ready in readies]
        shortest = min(infos, key=lambda info: info.max_model_len)
        model_info = dataclasses.replace(
            infos[0],
            max_num_seqs=sum(info.max_num_seqs for info in infos),
            max_model_len=shortest.max_model_len,
            feature_uses=shortest.feature_uses,
            max_fitting_tokens=min(info.max_fitting_tokens for info in infos),
        )
        return dataclasses.replace(readies[0], model_info=model_info, stats=self._merged_stats())

    def send(self, message: EngineInput) -> None:
        """See `EngineTransport.send`. Ignores aborts of requests that ended with their replica."""
        with self._lock:
            match message:
                case AddRequest(request=request):
                    self._add(request)
                case AbortRequests(request_ids=request_ids):
                    self._abort(request_ids)
                case UtilityCall():
                    self._call(message)
                case Shutdown():
                    self._is_closing = True
                    # Also to dead replicas, so that their supervisors stop restarting engines.
                    for replica in self._replicas:
                        replica.send(message)

    def deliver_on(
        self,
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[EngineOutput | EngineReady], None],
    ) -> None:
        """See `LoopTransport.deliver_on`."""
        self._on_message = on_message
        for idx, replica in enumerate(self._replicas):
            replica.transport.deliver_on(loop, functools.partial(self._on_replica_message, idx))

    @property
    def stall(self) -> str | None:
        """See `LoopTransport.stall`. None while at least one living replica makes progress."""
        replicas = enumerate(self._replicas)
        stalls = [(idx, replica.transport.stall) for idx, replica in replicas if replica.is_alive]
        if not stalls or any(stall is None for _, stall in stalls):
            return None
        return " ".join(f"replica {idx}: {stall}" for idx, stall in stalls)

    def give_up(self, reason: str) -> None:
        """See `LoopTransport.give_up`. Gives up the replica whose message is handled, else all."""
        sender_idx = self._sender_idx
        for idx, replica in enumerate(self._replicas):
            if sender_idx is None or idx == sender_idx:
                replica.transport.give_up(reason)

    def close(self) -> None:
        """See `LoopTransport.close`."""
        # Send `Shutdown` to all replicas first, so that they finish their steps at the same time.
        # `close` may run at interpreter exit, when Python cannot start threads for this.
        self.send(Shutdown())
        for replica in self._replicas:
            replica.transport.close()

    @property
    def _is_alive(self) -> bool:
        return any(replica.is_alive for replica in self._replicas)

    def _add(self, request: EngineRequest) -> None:
        message = AddRequest(request=request)
        idx = self._find(request.fork_from)
        # Hash the prompt only if a replica must be chosen: beam search sends a fork for each token.
        if idx is None or not self._send(idx, message):
            chain = prompt_chain(request) if self._have_prefix_caches else []
            params = request.sampling_params
            # Prompt log-probabilities need every prompt token computed, so no cached block is read.
            # The computed blocks are cached for other requests.
            reads_none = params.skip_reading_prefix_cache or params.prompt_logprobs is not None
            readable_chain = [] if reads_none else chain
            stalled = [i for i in self._router if self._replicas[i].transport.stall is not None]
            idx = self._router.choose(readable_chain, avoid=stalled)
            while not self._send(idx, message):
                idx = self._router.choose(readable_chain, avoid=stalled)
            self._router.record(idx, chain)
        self._replicas[idx].requests[request.request_id] = request.keep_blocks
        self._update_load(idx)

    def _send(self, idx: int, message: EngineInput) -> bool:
        """Sends a message to a replica; False if its engine has ended, so it gets no more."""
        is_sent = self._replicas[idx].send(message)
        if not is_sent:
            self._router.remove(idx)
        return is_sent

    def _update_load(self, idx: int) -> None:
        if idx in self._router:
            self._router.set_num_requests(idx, len(self._replicas[idx].requests))

    def _find(self, request_id: str | None) -> int | None:
        """The reachable replica that runs a request or keeps its blocks, if any."""
        for idx in self._router:
            if self._replicas[idx].holds_blocks_of(request_id):
                return idx
        return None

    def _abort(self, request_ids: Sequence[str]) -> None:
        for idx, replica in enumerate(self._replicas):
            own_ids = replica.remove(request_ids) if replica.is_alive else []
            if own_ids:
                self._send(idx, AbortRequests(request_ids=own_ids))
                self._update_load(idx)

    def _call(self, call: UtilityCall) -> None:
        called = sorted(self._router)
        if call.method in _FIRST_REPLICA_METHODS:
            called = called[:1]
        if not called:
            raise EngineDeadError("all engines have ended.")
        # Before the sends, because a reply may arrive during them.
        pending = self._calls[call.call_id] = _PendingCall(call.method, set(called))
        for idx in called:
            arguments = call.arguments
            if call.method == "start_profile":
                # A folder per replica, because all replicas use the same file names.
                arguments = (f"{arguments[0]}/replica-{idx}",)
            if not self._send(idx, dataclasses.replace(call, arguments=arguments)):
                pending.awaited.discard(idx)
        self._answer_if_complete(call.call_id)

    def _on_replica_message(self, idx: int, message: EngineOutput | EngineReady) -> None:
        """Handles a message of a replica, on the loop."""
        with self._lock:
            sender_idx, self._sender_idx = self._sender_idx, idx
            try:
                self._handle(idx, message)
            # Without this, the loop would log the error and callers would wait forever.
            except Exception as error:
                logger.exception("a message of replica %d could not be used", idx)
                self.give_up(f"{type(error).__name__}: {error}")
            finally:
                self._sender_idx = sender_idx

    def _handle(self, idx: int, message: EngineOutput | EngineReady) -> None:
        match message:
            case StepOutputs():
                self._handle_step(idx, message)
            case UtilityReply():
                self._handle_reply(idx, message)
            case EngineReady():
                self._handle_ready(idx, message)
            case EngineDead():
                self._handle_dead(idx, message)

    def _handle_step(self, idx: int, step: StepOutputs) -> None:
        replica = self._replicas[idx]
        replica.update_stats(step.stats)
        # Before requests are removed. If the client fails, `EngineDead` must list all of them.
        self._on_message(dataclasses.replace(step, stats=self._merged_stats(), engine_idx=idx))
        replica.record_finished(step)
        self._update_load(idx)

    def _handle_reply(self, idx: int, reply: UtilityReply) -> None:
        call = self._calls.get(reply.call_id)
        if call is None or idx not in call.awaited:
            raise InvariantError(f"replica {idx} was not asked to answer call {reply.call_id}.")
        if call.method == "get_stats" and reply.error is None:
            stats = msgspec.json.decode(reply.result_json, type=SchedulerStats)
            self._replicas[idx].update_stats(stats)
        is_reset = call.method == "reset_prefix_cache" and reply.result_json == "true"
        if is_reset and idx in self._router:
            self._router.forget_prompts(idx)
        call.replies.append(reply)
        call.awaited.discard(idx)
        self._answer_if_complete(reply.call_id)

    def _answer_if_complete(self, call_id: int) -> None:
        """Sends the client the combined reply, if no replica's reply is missing."""
        call = self._calls.get(call_id)
        if call is None or call.awaited:
            return
        del self._calls[call_id]
        if not call.replies:
            reply = UtilityReply(call_id=call_id, error="the called engine has ended.")
        elif call.method == "get_stats":
            stats_json = msgspec.json.encode(self._merged_stats()).decode()
            reply = UtilityReply(call_id=call_id, result_json=stats_json)
        else:
            reply = _merge_replies(call.method, call.replies)
        self._on_message(reply)

    def _handle_ready(self, idx: int, ready: EngineReady) -> None:
        was_dead = not self._is_alive
        replica = self._replicas[idx]
        replica.record_successor(ready)
        self._router.remove(idx)
        self._router.add(idx, ready.model_info.max_fitting_tokens)
        if self._is_closing:
            replica.send(Shutdown())
        if was_dead:
            self._on_message(self.ready)

    def _handle_dead(self, idx: int, dead: EngineDead) -> None:
        was_dead = not self._is_alive
        if not self._is_closing:
            next_state = "will be restarted" if dead.retry_after_s else "will not be restarted"
            logger.error("replica %d has ended and %s: %s", idx, next_state, dead.reason)
        request_ids = self._replicas[idx].record_end(dead)
        self._router.remove(idx)
        reason = f"replica {idx}: {dead.reason}"
        if self._is_alive:
            for call_id, call in list(self._calls.items()):
                call.awaited.discard(idx)
                self._answer_if_complete(call_id)
            if request_ids:
                retry_after_s = None if self._is_closing else _RETRY_AFTER_S
                self._on_message(
                    EngineDead(reason=reason, retry_after_s=retry_after_s, request_ids=request_ids)
                )
            return
        # The client fails all pending calls when it receives `EngineDead`.
        self._calls.clear()
        waits = [replica.ended.retry_after_s for replica in self._replicas]
        retry_after_s = min((wait for wait in waits if wait is not None), default=None)
        # If all replicas were dead before, the client already has an `EngineDead`. It receives a
        # final one when no replica will be restarted.
        if retry_after_s is None or not was_dead:
            self._on_message(EngineDead(reason=reason, retry_after_s=retry_after_s))

    def _merged_stats(self) -> SchedulerStats:
        """Sums the statistics of all replicas; counters include engines that died."""
        engines = tuple(replica.stats for replica in self._replicas)
        return msgspec.structs.replace(
            sum_stats(engines), engine_start_time=self._start_time, engines=engines
        )


def _merge_replies(method: str, replies: Sequence[UtilityReply]) -> UtilityReply:
    """Combines the replies of all replicas into one."""
    succeeded = [reply for reply in replies if reply.error is None]
    failed = [reply for reply in replies if reply.error is not None]
    if method == "explain_prefix_cache_miss":
        # Only one replica knows the request; the others reply with an error.
        return succeeded[0] if succeeded else failed[0]
    if failed:
        return failed[0]
    if all(reply.result_json in ("true", "false") for reply in succeeded):
        # False if one replica replied false, although the others did what was asked.
        is_done = all(reply.result_json == "true" for reply in succeeded)
        return dataclasses.replace(succeeded[0], result_json="true" if is_done else "false")
    return succeeded[0]
