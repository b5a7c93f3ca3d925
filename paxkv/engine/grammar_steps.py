"""Applies grammars to a step: finds the requests that need masks, and ends requests."""

from collections.abc import Iterable

import msgspec

from paxkv.contracts.engine_output import EngineCoreOutput, FinishReason
from paxkv.contracts.protocols import ScheduledRequest, Scheduler
from paxkv.contracts.scheduler_output import SchedulerOutput
from paxkv.structured_output.bound_request import GrammarEnd
from paxkv.structured_output.grammar_manager import GrammarManager


def masked_request_ids(
    running: Iterable[ScheduledRequest], scheduler_output: SchedulerOutput
) -> list[str]:
    """Returns the requests with a grammar for which a step draws a token.

    A request draws no token if the step does not reach the end of its prompt.
    """
    return [
        request.request_id
        for request in running
        if request.needs_grammar
        and request.request_id in scheduler_output.num_scheduled_tokens
        and request.num_computed_tokens >= request.num_tokens
    ]


def advance_grammars(
    outputs: list[EngineCoreOutput],
    scheduler: Scheduler,
    grammars: GrammarManager | None,
    in_flight: Iterable[SchedulerOutput] = (),
) -> list[EngineCoreOutput]:
    """Advances grammars by a step's tokens, and ends requests whose grammars end.

    A grammar ends when the output is complete, or when no token can follow.

    Args:
        in_flight: Steps whose tokens have not been fetched. If the grammar of a request in such a
            step has ended, the request ends when the step is fetched. Its output then has the
            log-probabilities of its prompt.

    Returns:
        The step's outputs, with the last outputs of the requests that end.
    """
    if grammars is None or grammars.num_requests == 0:
        return outputs
    awaited = {req_id for step in in_flight for req_id in step.num_scheduled_tokens}
    # The grammars of these requests allowed no token in this step, so their tokens are dropped.
    ended = grammars.drain_ended(awaited)
    num_kept = dict.fromkeys(ended, 0)
    for output in outputs:
        req_id, token_ids = output.request_id, output.new_token_ids
        if req_id in ended:
            continue
        if output.finish_reason is None or grammars.ends_within(req_id, len(token_ids)):
            num_kept[req_id] = grammars.advance(req_id, token_ids)
        else:
            grammars.remove(req_id)
    ended |= grammars.drain_ended(awaited)
    if not ended:
        return outputs
    by_id = {
        request.request_id: EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            num_cached_tokens=request.num_cached_tokens,
            num_preemptions=request.num_preemptions,
        )
        for request in map(scheduler.requests.get, ended)
        if request is not None
    } | {output.request_id: output for output in outputs}
    for reason in ("stop", "error"):
        scheduler.finish_requests(
            [req_id for req_id, end in ended.items() if _finish_reason(end) == reason], reason
        )
    return [
        *(output for output in outputs if output.request_id not in ended),
        *(
            _last_output(
                by_id.get(req_id) or EngineCoreOutput(request_id=req_id, new_token_ids=[]),
                end,
                num_kept=num_kept.get(req_id, 0),
            )
            for req_id, end in ended.items()
        ),
    ]


def _finish_reason(end: GrammarEnd) -> FinishReason:
    return "stop" if end.error is None else "error"


def _last_output(output: EngineCoreOutput, end: GrammarEnd, *, num_kept: int) -> EngineCoreOutput:
    """Makes the last output of a request whose grammar has ended; keeps `num_kept` new tokens."""
    return msgspec.structs.replace(
        output,
        new_token_ids=output.new_token_ids[:num_kept],
        logprobs=output.logprobs[:num_kept] if output.logprobs and num_kept else None,
        finish_reason=_finish_reason(end),
        stop_reason=end.error,
    )
