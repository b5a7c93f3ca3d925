"""A client's transport to fake engines, whose messages the test sends."""

import dataclasses
from collections.abc import Sequence

from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.engine_output import (
    EngineCoreOutput,
    EngineDead,
    SchedulerStats,
    StepOutputs,
    UtilityReply,
)
from paxkv.contracts.engine_request import AddRequest, EngineRequest, UtilityCall
from paxkv.contracts.engine_start import EngineReady, ModelInfo
from paxkv.errors import EngineDeadError
from paxkv.fleet.data_parallel import DataParallelTransport
from tests.paxkv.engine.fake_engine_process import VOCAB_SIZE

INFO = ModelInfo(
    served_model_name="fake",
    model="fake",
    max_model_len=64,
    vocab_size=VOCAB_SIZE,
    max_fitting_tokens=512,
    created=0,
    max_num_seqs=8,
    cache_settings={},
)


def ready_engine(start_time: float = 0.0, **info: int) -> EngineReady:
    return EngineReady(
        model_info=dataclasses.replace(INFO, **info),
        eos_token_ids=(0,),
        max_prompt_tokens=None,
        stats=SchedulerStats(num_blocks=10, engine_start_time=start_time),
    )


def request(request_id: str, **settings: object) -> EngineRequest:
    settings = {"prompt_token_ids": [1], "sampling_params": SamplingParams()} | settings
    return EngineRequest(request_id=request_id, **settings)


class FakeReplica:
    """A `LoopTransport` that stores sent messages; `say` delivers a message of its engine."""

    stall: str | None = None

    def __init__(self) -> None:
        self.sent: list[object] = []
        self.is_dead = False

    def send(self, message: object) -> None:
        if self.is_dead:
            raise EngineDeadError("the engine has ended.")
        self.sent.append(message)

    def deliver_on(self, loop: object, on_message: object) -> None:
        self.say = on_message

    def give_up(self, reason: str) -> None:
        self.is_dead = True
        self.say(EngineDead(reason=reason))

    def close(self) -> None:
        self.sent.append("closed")

    def take(self, kind: type) -> list:
        """Returns the sent messages of one kind, and removes all sent messages."""
        found = [message for message in self.sent if isinstance(message, kind)]
        self.sent.clear()
        return found


class Replicas:
    """Replicas behind one transport, and the messages that the client received (`heard`)."""

    def __init__(self, num_replicas: int = 3, **settings: bool) -> None:
        self.engines = [FakeReplica() for _ in range(num_replicas)]
        replicas = [(engine, ready_engine()) for engine in self.engines]
        self.transport = DataParallelTransport(replicas, **settings)
        self.heard: list[object] = []
        self.transport.deliver_on(None, self.heard.append)

    def add(self, request_id: str, **settings: object) -> int:
        """Adds a request; returns the replica that it went to."""
        self.transport.send(AddRequest(request=request(request_id, **settings)))
        (idx,) = [
            idx
            for idx, engine in enumerate(self.engines)
            if any(m.request.request_id == request_id for m in engine.take(AddRequest))
        ]
        return idx

    def die(self, idx: int, retry_after_s: int | None = 5) -> None:
        self.engines[idx].is_dead = True
        self.engines[idx].say(EngineDead(reason="boom", retry_after_s=retry_after_s))

    def restart(self, idx: int, start_time: float) -> None:
        self.engines[idx].is_dead = False
        self.engines[idx].say(ready_engine(start_time))

    def end(self, idx: int, request_id: str, stats: SchedulerStats) -> None:
        output = EngineCoreOutput(request_id=request_id, new_token_ids=[7], finish_reason="stop")
        self.engines[idx].say(
            StepOutputs(outputs=[output], stats=stats, timestamp=0.0, monotonic_s=0.0)
        )

    def call(self, method: str, answers: Sequence[UtilityReply]) -> UtilityReply:
        """Sends a control call, delivers each replica's reply, and returns the merged reply."""
        self.transport.send(UtilityCall(call_id=3, method=method))
        self.heard.clear()
        for engine, answer in zip(self.engines, answers, strict=True):
            assert self.heard == []
            engine.say(answer)
        (reply,) = self.heard
        return reply
