"""What sampled tokens do to a request: it grows, and perhaps stops."""

from collections.abc import Iterable, Mapping

from paxkv.contracts.engine_output import NO_TOKEN_LEFT, EngineCoreOutput, FinishReason
from paxkv.contracts.scheduler_output import ModelRunnerOutput, TokenLogprobs
from paxkv.scheduler.request import Request


def check_stop(request: Request) -> tuple[FinishReason, int | str | None] | None:
    """Whether the last token ends the request, which has at least one output token.

    Stop strings are found where text is made, and come back as `Scheduler.finish_requests`.

    Returns:
        Finish reason and stop reason; None when the request goes on.
    """
    all_token_ids = request.all_token_ids
    num_tokens = len(all_token_ids)
    # Length is checked also below min_tokens: there is no room for another token.
    if (
        all_token_ids[-1] in request.ending_token_ids
        and num_tokens - request.num_prompt_tokens >= request.min_tokens
    ):
        last_token_id = all_token_ids[-1]
        return "stop", None if last_token_id == request.eos_token_id else last_token_id
    if num_tokens >= request.max_num_tokens:
        return "length", None
    # Here, because the device would draw one all the same.
    if not request.has_token_left():
        return "stop", NO_TOKEN_LEFT
    return None


def append_plain(
    requests: Mapping[str, Request],
    runner_output: ModelRunnerOutput,
    num_wanted: Mapping[str, int] | None,
) -> tuple[list[EngineCoreOutput | None], list[int]]:
    """Adds a step's tokens to requests for which they do nothing but come, as most do.

    The loop is the host's cost of a token on its way home, so that it calls nothing of its own.

    Args:
        num_wanted: Tokens that each request was to get; None is one each.

    Returns:
        An output for each request of `runner_output`, and the places of those without one. They are
        to be looked at by themselves, and nothing has changed: a token may end the request or fills
        a block, or it is not among `requests`, or has other tokens than it was to get.
    """
    outputs: list[EngineCoreOutput | None] = []
    places: list[int] = []
    get_request = requests.get
    for req_id, token_ids, logprobs in zip(
        runner_output.req_ids, runner_output.sampled_token_ids, runner_output.logprobs, strict=True
    ):
        request = get_request(req_id)
        if request is not None:
            all_token_ids = request.all_token_ids
            num_tokens, num_new_tokens = len(all_token_ids), len(token_ids)
            if (
                num_tokens + num_new_tokens < request.num_tokens_to_look_at
                and num_new_tokens == (1 if num_wanted is None else num_wanted[req_id])
                and request.num_computed_tokens >= num_tokens
                and request.ending_token_ids.isdisjoint(token_ids)
            ):
                all_token_ids += token_ids
                if request.num_output_placeholders > 0:
                    request.num_output_placeholders -= num_new_tokens
                outputs.append(
                    EngineCoreOutput(
                        request_id=req_id,
                        new_token_ids=token_ids,
                        logprobs=logprobs,
                        num_cached_tokens=request.num_cached_tokens,
                        num_preemptions=request.num_preemptions,
                    )
                )
                continue
        places.append(len(outputs))
        outputs.append(None)
    return outputs, places


def append_until_stop(
    request: Request,
    sampled_token_ids: list[int],
    logprobs: list[TokenLogprobs] | None,
) -> EngineCoreOutput:
    """Adds a step's tokens to a request, up to and with the one that ends it.

    A request that ends has its `status` and `stop_reason` set; its blocks are the caller's.

    Args:
        sampled_token_ids: At least one. Those after the end are dropped.
        logprobs: One entry per sampled token, or None.
    """
    finish_reason, stop_reason = None, None
    may_end = request.may_be_ended_by(sampled_token_ids)
    if not may_end:
        request.append_output_tokens(sampled_token_ids)
    for num_kept, token_id in enumerate(sampled_token_ids if may_end else (), 1):
        request.append_output_tokens([token_id])
        stop = check_stop(request)
        if stop is not None:
            finish_reason, stop_reason = stop
            request.finish(finish_reason, stop_reason)
            if num_kept < len(sampled_token_ids):
                sampled_token_ids = sampled_token_ids[:num_kept]
                logprobs = None if logprobs is None else logprobs[:num_kept]
            break
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=sampled_token_ids,
        logprobs=logprobs,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
    )


def end_pooled(request: Request, pooling_output: list[float]) -> EngineCoreOutput:
    """Ends a pooled request, whose prompt is computed."""
    request.finish("stop")
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason=request.finish_reason,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        pooling_output=pooling_output,
    )


def num_rejected_tokens(spec_token_ids: list[int] | None, sampled_token_ids: list[int]) -> int:
    """Drafts of a step that were not right: of k drafts, all but the first are kept of m tokens.

    A step with drafts samples the accepted ones and one token more: drafts [7, 8, 9] and tokens
    [7, 4] -> 1 accepted, 2 rejected.
    """
    if not spec_token_ids or not sampled_token_ids:
        return 0
    return max(len(spec_token_ids) - (len(sampled_token_ids) - 1), 0)


def keep_drafts(
    requests: Mapping[str, Request],
    draft_token_ids: Mapping[str, list[int]],
    outputs: Iterable[EngineCoreOutput],
) -> None:
    """Keeps drafts for the next step of those who got tokens: a prompt in pieces has none."""
    for output in outputs:
        drafts = draft_token_ids.get(output.request_id)
        request = requests.get(output.request_id)
        # With a further step in flight they come late: they follow a token that it computes.
        if drafts and request is not None and request.num_computed_tokens < request.num_tokens:
            request.spec_token_ids = list(drafts)
