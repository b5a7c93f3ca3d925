"""The calls of a scheduler and their results, in the form that a trace file stores.

A scheduler depends only on its calls, and on the answers of the KV connector and the grammar gate.
So a trace is a list of calls. Each has the arguments, the questions and answers during the call,
the result, and the movements of blocks.
"""

import dataclasses
from typing import Literal

import msgspec

from paxkv.contracts.engine_output import EngineCoreOutput, FinishReason
from paxkv.contracts.engine_request import EngineRequest
from paxkv.contracts.scheduler_output import KVConnectorOutput, ModelRunnerOutput, SchedulerOutput
from paxkv.errors import TraceFileError
from paxkv.kv_cache.observers.block_movements import BlockMovements
from paxkv.scheduler.request import EndReason
from paxkv.trace.json_errors import JSON_ERRORS
from paxkv.trace.outside import Question

ControlMethod = Literal["reset_prefix_cache"]


class NewRow(msgspec.Struct, array_like=True, frozen=True):
    """A request that runs for the first time: `[id, tokens, computed tokens, blocks by group]`.

    Computed tokens are its prefix hits, or the tokens that it shares with its fork source.
    """

    req_id: str
    num_scheduled_tokens: int
    num_computed_tokens: int
    block_ids: list[list[int]]


class CachedRow(msgspec.Struct, array_like=True, frozen=True):
    """A request that ran before: `[id, tokens, computed tokens, output tokens, new blocks]`.

    New blocks are null if there are none. For a request that resumes, they are all its blocks.
    """

    req_id: str
    num_scheduled_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    new_block_ids: list[list[int]] | None


class Decision(msgspec.Struct, omit_defaults=True, frozen=True, forbid_unknown_fields=True):
    """A `SchedulerOutput` without fields that follow from the requests; empty fields are omitted.

    Args:
        order: Request ids in the order of `num_scheduled_tokens`, if it differs from the order of
            `running`, `resumed` and `new`.
        block_copies: `[source, target]` pairs.
        slot_switches: Positions from which new slots of states are written within a burst.

    The connector's answers contain its transfers; see `outside.py`.
    """

    num_decode_steps: int = 1
    running: list[CachedRow] = []
    resumed: list[CachedRow] = []
    new: list[NewRow] = []
    preempted: list[str] = []
    finished: list[str] = []
    order: list[str] = []
    spec_decode_tokens: dict[str, list[int]] = {}
    encoder_inputs: dict[str, list[int]] = {}
    free_encoder_mm_hashes: list[str] = []
    num_common_prefix_blocks: list[int] = []
    block_copies: list[tuple[int, int]] = []
    slot_switches: dict[str, int] = {}

    @classmethod
    def from_output(cls, output: SchedulerOutput) -> "Decision":
        """Converts a `SchedulerOutput`. Sorts sets, because their order has no meaning."""
        num_tokens = output.num_scheduled_tokens
        cached = output.scheduled_cached_reqs
        rows = [
            CachedRow(req_id, num_tokens[req_id], num_computed, num_output, _as_lists(blocks))
            for req_id, num_computed, num_output, blocks in zip(
                cached.req_ids,
                cached.num_computed_tokens,
                cached.num_output_tokens,
                cached.new_block_ids,
                strict=True,
            )
        ]
        new = [
            NewRow(r.req_id, num_tokens[r.req_id], r.num_computed_tokens, list(r.block_ids))
            for r in output.scheduled_new_reqs
        ]
        running = [row for row in rows if row.req_id not in cached.resumed_req_ids]
        resumed = [row for row in rows if row.req_id in cached.resumed_req_ids]
        usual_order = [row.req_id for rows in (running, resumed, new) for row in rows]
        order = list(num_tokens)
        return cls(
            num_decode_steps=output.num_decode_steps,
            running=running,
            resumed=resumed,
            new=new,
            preempted=sorted(output.preempted_req_ids),
            finished=sorted(output.finished_req_ids),
            order=[] if order == usual_order else order,
            spec_decode_tokens=output.scheduled_spec_decode_tokens,
            encoder_inputs=output.scheduled_encoder_inputs,
            free_encoder_mm_hashes=output.free_encoder_mm_hashes,
            num_common_prefix_blocks=output.num_common_prefix_blocks,
            block_copies=[(c.source_block_id, c.target_block_id) for c in output.block_copies],
            slot_switches=output.slot_switches,
        )


class OutputRow(msgspec.Struct, array_like=True, frozen=True):
    """An `EngineCoreOutput` without log-probabilities, which do not affect scheduling."""

    req_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    num_cached_tokens: int

    @classmethod
    def from_output(cls, output: EngineCoreOutput) -> "OutputRow":
        return cls(
            output.request_id,
            output.new_token_ids,
            output.finish_reason,
            output.stop_reason,
            output.num_cached_tokens,
        )


class SampledRow(msgspec.Struct, array_like=True, frozen=True):
    """The runner's tokens for one request: `[id, tokens]`."""

    req_id: str
    token_ids: list[int]


class _Call(msgspec.Struct, omit_defaults=True, kw_only=True, tag_field="call", frozen=True):
    """The fields of every call.

    Args:
        at_s: Seconds from the recorder's start to the call. A replay does not compare it.
        took_s: Duration of the call. A replay does not compare it.
        error: `Type: message` of the error that the call raised.
        questions: The scheduler's questions to the KV connector and the grammar gate.
        moved: Movements of blocks; None if there were none.
    """

    at_s: float = 0.0
    took_s: float = 0.0
    error: str | None = None
    questions: list[Question] = []
    moved: BlockMovements | None = None


class AddRequestCall(_Call, tag="add_request", forbid_unknown_fields=True, frozen=True):
    """A new request.

    Args:
        request: JSON of the `EngineRequest`, without fields that have their default.
    """

    request: msgspec.Raw

    def engine_request(self) -> EngineRequest:
        """Decodes the request.

        Raises:
            TraceFileError: The JSON is not an `EngineRequest`.
        """
        try:
            return msgspec.json.decode(self.request, type=EngineRequest)
        except JSON_ERRORS as error:
            raise TraceFileError(f"a recorded request cannot be read: {error}.") from error


class FinishRequestsCall(_Call, tag="finish_requests", forbid_unknown_fields=True, frozen=True):
    """The engine ends requests, for example after an abort."""

    request_ids: list[str]
    finish_reason: EndReason


class ControlCall(_Call, tag="control", forbid_unknown_fields=True, frozen=True):
    """Any other call that changes the scheduler's state."""

    method: ControlMethod
    arguments: list[bool] = []
    result: bool | None = None


class ScheduleCall(_Call, tag="schedule", forbid_unknown_fields=True, frozen=True):
    """The decision of a step.

    Args:
        step: Number of the step, from 1.
        max_decode_steps: The argument of `schedule`.
        decision: None if the call raised an error.
        num_running_reqs: This and the next two are counts after the decision.
    """

    step: int
    max_decode_steps: int = 1
    decision: Decision | None = None
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_free_blocks: int = 0


class UpdateCall(_Call, tag="update", forbid_unknown_fields=True, frozen=True):
    """The results of a step.

    Args:
        step: Number of the step.
        burst_drafts: See `ModelRunnerOutput`.
        pooled: Requests that the step ended with a `pooler_output`, which is not stored.
    """

    step: int
    sampled: list[SampledRow] = []
    draft_token_ids: dict[str, list[int]] = {}
    burst_drafts: dict[str, list[tuple[int, int]]] = {}
    pooled: list[str] = []
    kv_connector_output: KVConnectorOutput | None = None
    outputs: list[OutputRow] = []

    def runner_output(self) -> ModelRunnerOutput:
        """Returns the runner's output without log-probabilities and results of pooling."""
        return ModelRunnerOutput(
            req_ids=[row.req_id for row in self.sampled],
            sampled_token_ids=[row.token_ids for row in self.sampled],
            logprobs=[None] * len(self.sampled),
            draft_token_ids=self.draft_token_ids,
            burst_drafts=self.burst_drafts,
            pooler_output={req_id: [] for req_id in self.pooled},
            kv_connector_output=self.kv_connector_output,
        )


Call = AddRequestCall | FinishRequestsCall | ControlCall | ScheduleCall | UpdateCall


def encode_request(request: EngineRequest) -> msgspec.Raw:
    """Encodes a request for `AddRequestCall.request`."""
    fields = _fields_to_write(request)
    fields["sampling_params"] = _fields_to_write(request.sampling_params)
    return msgspec.Raw(msgspec.json.encode(fields))


def _fields_to_write(instance: object) -> dict[str, object]:
    values = ((field, getattr(instance, field.name)) for field in dataclasses.fields(instance))
    return {
        field.name: value
        for field, value in values
        if field.default is dataclasses.MISSING or value != field.default
    }


def _as_lists(blocks: tuple[list[int], ...] | None) -> list[list[int]] | None:
    return None if blocks is None else list(blocks)
