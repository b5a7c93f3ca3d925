"""`DataParallelTransport`: several engines that share the requests, as if they were one."""

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
from paxkv.fleet.replica_prefixes import ReplicaPrefixes, prompt_chain
from paxkv.fleet.stats_sum import add_counters, keep_expert_tokens, sum_stats

logger = logging.getLogger(__name__)

# A request whose engine died may come again at once, to another.
_RETRY_AFTER_S = 1
# What the inspector shows is one engine's.
_ASKED_OF_THE_FIRST = ("inspect", "inspect_block")
# A replica that knows a prompt's beginning may have so many unfinished requests more than the least
# busy one, or one for so many of that one's; but no more than that one has: 0 beside 0, 2 beside 1,
# 4 beside 2, 10 beside 8, 15 beside 12.
_MORE_REQUESTS = 2
_MORE_FOR_EACH = 4


@dataclasses.dataclass(slots=True)
class _Replica:
    """One engine, as far as its messages tell.

    Args:
        stats: `own_stats` with `counted_before`.
        own_stats: What its engine last said of itself.
        counted_before: What engines had counted in whose place it is, and how many they were.
        ended: Its last words, while none has taken its place.
        prefixes: Of the prompts that it was sent.
        is_mute: It takes no message any more; its last words are on their way, or have come.
        requests: Ids of those that it was sent and has not ended; whether they keep their blocks.
        kept_ids: Those that have ended, and keep their blocks for forks.
    """

    transport: LoopTransport
    stats: SchedulerStats
    prefixes: ReplicaPrefixes
    own_stats: SchedulerStats = SchedulerStats()
    counted_before: SchedulerStats = SchedulerStats()
    ended: EngineDead | None = None
    is_mute: bool = False
    requests: dict[str, bool] = dataclasses.field(default_factory=dict)
    kept_ids: set[str] = dataclasses.field(default_factory=set)

    def note_stats(self, stats: SchedulerStats) -> None:
        """Remembers what its engine said of itself."""
        self.own_stats = keep_expert_tokens(stats, self.own_stats)
        self.stats = add_counters(self.own_stats, self.counted_before)

    def note_end(self) -> None:
        """Nothing runs here; what was counted stays."""
        nothing = SchedulerStats(engine_start_time=self.stats.engine_start_time)
        self.stats = add_counters(nothing, self.stats)

    def note_successor(self, stats: SchedulerStats) -> None:
        """Another engine has taken its place, which says this of itself."""
        before = add_counters(SchedulerStats(), self.stats)
        self.counted_before = msgspec.structs.replace(
            before, num_replaced_engines=before.num_replaced_engines + 1
        )
        self.note_stats(stats)


@dataclasses.dataclass(slots=True)
class _PendingCall:
    """A control call that some replicas have not answered."""

    method: str
    awaited: set[int]
    replies: list[UtilityReply] = dataclasses.field(default_factory=list)


class DataParallelTransport:
    """The `LoopTransport` of replicas: engines with the same model and a KV cache each.

    A request goes to the replica with the fewest that are unfinished, and stays there; or to one
    with hardly more that was sent more of its prompt before, in other requests, and is likely to
    have it in its prefix cache. A replica with nothing to do comes before both. A fork goes to
    where its blocks are. Control calls go to all. When a replica dies, the client hears which
    requests have ended with it, and the others go on; it hears of an engine's end when no replica
    is left.

    `send` may be called from any thread.

    Args:
        replicas: What each answered when it was ready.
        have_prefix_caches: Equal beginnings of prompts are worth something to them.

    Source: vLLM `v1/engine/core_client.py`, its load-balancing client, which knows no prompts.
    """

    def __init__(
        self,
        replicas: Sequence[tuple[LoopTransport, EngineReady]],
        *,
        have_prefix_caches: bool = True,
    ) -> None:
        self._replicas = [
            _Replica(
                transport,
                ready.stats,
                ReplicaPrefixes(ready.model_info.max_fitting_tokens),
                own_stats=ready.stats,
            )
            for transport, ready in replicas
        ]
        self._have_prefix_caches = have_prefix_caches
        self._calls: dict[int, _PendingCall] = {}
        self._is_closing = False
        # Whose message the client is being told of.
        self._speaker: int | None = None
        self._start_time = min(ready.stats.engine_start_time for _, ready in replicas)
        self._on_message: Callable[[EngineOutput | EngineReady], None] | None = None
        self._readies = [ready for _, ready in replicas]
        # The client's thread and the loop's; and a client may send while it is told something.
        self._lock = threading.RLock()

    @property
    def ready(self) -> EngineReady:
        """What clients are to know of all of them together."""
        infos = [ready.model_info for ready in self._readies]
        shortest = min(infos, key=lambda info: info.max_model_len)
        model_info = dataclasses.replace(
            infos[0],
            max_num_seqs=sum(info.max_num_seqs for info in infos),
            max_model_len=shortest.max_model_len,
            feature_uses=shortest.feature_uses,
            max_fitting_tokens=min(info.max_fitting_tokens for info in infos),
        )
        return dataclasses.replace(
            self._readies[0], model_info=model_info, stats=self._merged_stats()
        )

    def send(self, message: EngineInput) -> None:
        """As `EngineTransport.send`; an abort of what has ended with its replica is no error."""
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
                    # Those too of which another is being started.
                    for idx in range(len(self._replicas)):
                        self._send_to(idx, message)

    def deliver_on(
        self,
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[EngineOutput | EngineReady], None],
    ) -> None:
        """See `LoopTransport.deliver_on`."""
        self._on_message = on_message
        for idx, replica in enumerate(self._replicas):
            replica.transport.deliver_on(loop, functools.partial(self._take, idx))

    @property
    def stall(self) -> str | None:
        """See `LoopTransport.stall`. None while any living replica makes progress."""
        stalls = [(idx, self._replicas[idx].transport.stall) for idx in self._alive()]
        if not stalls or any(stall is None for _, stall in stalls):
            return None
        return " ".join(f"replica {idx}: {stall}" for idx, stall in stalls)

    def give_up(self, reason: str) -> None:
        """See `LoopTransport.give_up`: of the replica whose message it was, if that is known."""
        speaker = self._speaker
        for idx, replica in enumerate(self._replicas):
            if speaker is None or idx == speaker:
                replica.transport.give_up(reason)

    def close(self) -> None:
        """See `LoopTransport.close`."""
        # First to all, because each ends the step that it computes. Not on threads: there are no
        # more of them when the interpreter ends.
        self.send(Shutdown())
        for replica in self._replicas:
            replica.transport.close()

    def _alive(self) -> list[int]:
        return [idx for idx, replica in enumerate(self._replicas) if replica.ended is None]

    def _hearing(self) -> list[int]:
        return [idx for idx in self._alive() if not self._replicas[idx].is_mute]

    def _add(self, request: EngineRequest) -> None:
        message = AddRequest(request=request)
        idx = self._find(request.fork_from)
        # Not of forks, whose place is given: there may be one for each of n long prompts, or for
        # each token of a beam.
        if idx is None or not self._send_to(idx, message):
            chain = prompt_chain(request) if self._have_prefix_caches else []
            params = request.sampling_params
            # Prompt log-probabilities need every token computed; what is computed is cached.
            reads_none = params.skip_reading_prefix_cache or params.prompt_logprobs is not None
            wanted = [] if reads_none else chain
            idx = self._choose(wanted)
            while not self._send_to(idx, message):
                idx = self._choose(wanted)
            self._replicas[idx].prefixes.note(chain)
        self._replicas[idx].requests[request.request_id] = request.keep_blocks

    def _find(self, request_id: str | None) -> int | None:
        """The replica that has a request or its blocks."""
        for idx in self._hearing():
            replica = self._replicas[idx]
            if request_id in replica.requests or request_id in replica.kept_ids:
                return idx
        return None

    def _choose(self, chain: Sequence[int]) -> int:
        """The replica for a prompt.

        Args:
            chain: As of `prompt_chain`.
        """
        hearing = self._hearing()
        if not hearing:
            raise EngineDeadError("all engines have ended.")
        # A replica that makes no progress gets a request only if all others make none either.
        moving = [idx for idx in hearing if self._replicas[idx].transport.stall is None]
        num_requests = {idx: len(self._replicas[idx].requests) for idx in moving or hearing}
        fewest = min(num_requests.values())
        # None more where one has nothing to do: what all prompts begin with would keep few callers
        # at one replica, and the others would never learn it.
        most = fewest + max(min(_MORE_REQUESTS, fewest), fewest // _MORE_FOR_EACH)
        # Of those with equally many the first: who comes alone, again and again, finds there what
        # the prefix cache has kept, also of prompts that are too short to be known.
        return max(
            (idx for idx, number in num_requests.items() if number <= most),
            key=lambda idx: (self._replicas[idx].prefixes.num_known(chain), -num_requests[idx]),
        )

    def _abort(self, request_ids: Sequence[str]) -> None:
        for idx in self._alive():
            replica = self._replicas[idx]
            own_ids = [i for i in request_ids if i in replica.requests or i in replica.kept_ids]
            if not own_ids:
                continue
            for request_id in own_ids:
                replica.requests.pop(request_id, None)
                replica.kept_ids.discard(request_id)
            self._send_to(idx, AbortRequests(request_ids=own_ids))

    def _call(self, call: UtilityCall) -> None:
        hearing = self._hearing()
        asked = hearing[:1] if call.method in _ASKED_OF_THE_FIRST else hearing
        if not asked:
            raise EngineDeadError("all engines have ended.")
        # First: an answer may come before the last is asked.
        pending = self._calls[call.call_id] = _PendingCall(call.method, set(asked))
        for idx in asked:
            arguments = call.arguments
            if call.method == "start_profile":
                # Each writes files of the same names.
                arguments = (f"{arguments[0]}/replica-{idx}",)
            if not self._send_to(idx, dataclasses.replace(call, arguments=arguments)):
                pending.awaited.discard(idx)
        self._answer(call.call_id)

    def _send_to(self, idx: int, message: EngineInput) -> bool:
        """Sends to one replica; False if it has died, and its last words are on their way."""
        try:
            self._replicas[idx].transport.send(message)
        except EngineDeadError:
            self._replicas[idx].is_mute = True
            return False
        return True

    def _take(self, idx: int, message: EngineOutput | EngineReady) -> None:
        """A message of a replica, on the loop."""
        with self._lock:
            speaker, self._speaker = self._speaker, idx
            try:
                self._note(idx, message)
            # The loop would only log it, and callers would wait for ever.
            except Exception as error:
                logger.exception("a message of replica %d could not be used", idx)
                self.give_up(f"{type(error).__name__}: {error}")
            finally:
                self._speaker = speaker

    def _note(self, idx: int, message: EngineOutput | EngineReady) -> None:
        match message:
            case StepOutputs():
                self._note_step(idx, message)
            case UtilityReply():
                self._note_reply(idx, message)
            case EngineReady():
                self._note_ready(idx, message)
            case EngineDead():
                self._note_dead(idx, message)

    def _note_step(self, idx: int, step: StepOutputs) -> None:
        replica = self._replicas[idx]
        replica.note_stats(step.stats)
        # First: a client that cannot use it hears of all its requests.
        self._on_message(dataclasses.replace(step, stats=self._merged_stats(), engine_idx=idx))
        for output in step.outputs:
            if output.finish_reason is not None:
                if replica.requests.pop(output.request_id, False):
                    replica.kept_ids.add(output.request_id)

    def _note_reply(self, idx: int, reply: UtilityReply) -> None:
        call = self._calls.get(reply.call_id)
        if call is None or idx not in call.awaited:
            raise InvariantError(f"replica {idx} answered call {reply.call_id}, not asked to.")
        if call.method == "get_stats" and reply.error is None:
            stats = msgspec.json.decode(reply.result_json, type=SchedulerStats)
            self._replicas[idx].note_stats(stats)
        if call.method == "reset_prefix_cache" and reply.result_json == "true":
            self._replicas[idx].prefixes.clear()
        call.replies.append(reply)
        call.awaited.discard(idx)
        self._answer(reply.call_id)

    def _answer(self, call_id: int) -> None:
        """Tells the client, if all have answered that will."""
        call = self._calls.get(call_id)
        if call is None or call.awaited:
            return
        del self._calls[call_id]
        if not call.replies:
            reply = UtilityReply(call_id=call_id, error="the engine that was asked has ended.")
        elif call.method == "get_stats":
            stats_json = msgspec.json.encode(self._merged_stats()).decode()
            reply = UtilityReply(call_id=call_id, result_json=stats_json)
        else:
            reply = _merge_replies(call.method, call.replies)
        self._on_message(reply)

    def _note_ready(self, idx: int, ready: EngineReady) -> None:
        was_dead = not self._alive()
        replica = self._replicas[idx]
        replica.note_successor(ready.stats)
        replica.ended, replica.is_mute = None, False
        replica.prefixes = ReplicaPrefixes(ready.model_info.max_fitting_tokens)
        self._readies[idx] = ready
        if self._is_closing:
            self._send_to(idx, Shutdown())
        if was_dead:
            self._on_message(self.ready)

    def _note_dead(self, idx: int, dead: EngineDead) -> None:
        replica = self._replicas[idx]
        was_dead = not self._alive()
        if not self._is_closing:
            goes_on = "another is being started" if dead.retry_after_s else "for good"
            logger.error("replica %d has ended, %s: %s", idx, goes_on, dead.reason)
        request_ids = tuple(replica.requests)
        replica.ended = dead
        replica.note_end()
        replica.requests.clear()
        replica.kept_ids.clear()
        replica.prefixes.clear()
        reason = f"replica {idx}: {dead.reason}"
        if self._alive():
            for call_id, call in list(self._calls.items()):
                call.awaited.discard(idx)
                self._answer(call_id)
            if request_ids:
                retry_after_s = None if self._is_closing else _RETRY_AFTER_S
                self._on_message(
                    EngineDead(reason=reason, retry_after_s=retry_after_s, request_ids=request_ids)
                )
            return
        # Their callers hear of the end.
        self._calls.clear()
        waits = [replica.ended.retry_after_s for replica in self._replicas]
        retry_after_s = min((wait for wait in waits if wait is not None), default=None)
        if retry_after_s is None or not was_dead:
            self._on_message(EngineDead(reason=reason, retry_after_s=retry_after_s))

    def _merged_stats(self) -> SchedulerStats:
        """Of all together: what runs is of those that live, what was counted of all ever."""
        engines = tuple(replica.stats for replica in self._replicas)
        return msgspec.structs.replace(
            sum_stats(engines), engine_start_time=self._start_time, engines=engines
        )


def _merge_replies(method: str, replies: Sequence[UtilityReply]) -> UtilityReply:
    """What all answered, as one answer."""
    told = [reply for reply in replies if reply.error is None]
    failed = [reply for reply in replies if reply.error is not None]
    if method == "explain_prefix_cache_miss":
        # Only one of them knows the request.
        return told[0] if told else failed[0]
    if failed:
        return failed[0]
    if all(reply.result_json in ("true", "false") for reply in told):
        # Those that did what was asked have done it, also where another could not.
        is_done = all(reply.result_json == "true" for reply in told)
        return dataclasses.replace(told[0], result_json="true" if is_done else "false")
    return told[0]
