"""Appends sampled tokens to requests, and finds out which requests end."""

from collections.abc import Iterable, Mapping

from paxkv.contracts.engine_output import NO_TOKEN_LEFT, EngineCoreOutput, FinishReason
from paxkv.contracts.scheduler_output import ModelRunnerOutput, TokenLogprobs
from paxkv.scheduler.request import Request


def check_stop(request: Request) -> tuple[FinishReason, int | str | None] | None:
    """Checks whether the last token ends the request, which has at least one output token.

    The detokenizer finds stop strings; the client then calls `Scheduler.finish_requests`.

    Returns:
        Finish reason and stop reason; None if the request continues.
    """
    all_token_ids = request.all_token_ids
    num_tokens = len(all_token_ids)
    # The length limit also holds below min_tokens, because there is no room for another token.
    if (
        all_token_ids[-1] in request.ending_token_ids
        and num_tokens - request.num_prompt_tokens >= request.min_tokens
    ):
        last_token_id = all_token_ids[-1]
        return "stop", None if last_token_id == request.eos_token_id else last_token_id
    if num_tokens >= request.max_num_tokens:
        return "length", None
    # The device would sample a forbidden token, so the request must end here.
    if not request.has_token_left():
        return "stop", NO_TOKEN_LEFT
    return None


def append_plain(
    requests: Mapping[str, Request],
    runner_output: ModelRunnerOutput,
    num_wanted: Mapping[str, int] | None,
) -> tuple[list[EngineCoreOutput | None], list[int]]:
    """Appends a step's tokens to the requests that need no further work, as most do.

    This loop runs for every token that the device returns, so it calls no function of paxkv.

    Args:
        num_wanted: Number of tokens that each request should get; None means one each.

    Returns:
        One entry for each request of `runner_output`, and the indices of the entries that are None.
        An entry is None, and its request unchanged, if a token may end the request or fills a
        block, if the request is not in `requests`, or if it got another number of tokens.
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
                num_tokens + num_new_tokens < request.checks_from_num_tokens
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
    """Appends a step's tokens to a request, up to and including the token that ends it.

    If the request ends, its `status` and `stop_reason` are set; the caller frees its blocks.

    Args:
        sampled_token_ids: Tokens after the one that ends the request are dropped.
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
    """Ends a pooled request when its prompt is computed."""
    request.finish("stop")
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason=request.finish_reason,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        pooling_output=pooling_output,
    )


def num_rejected_tokens(num_drafts: int, num_sampled_tokens: int) -> int:
    """Returns how many of a request's drafts a step rejected.

    The step returns the accepted drafts and one more token. Example: 3 drafts and 2 tokens -> 1
    accepted, 2 rejected.
    """
    if num_drafts == 0 or num_sampled_tokens == 0:
        return 0
    return max(num_drafts - (num_sampled_tokens - 1), 0)


def keep_drafts(
    requests: Mapping[str, Request],
    draft_token_ids: Mapping[str, list[int]],
    outputs: Iterable[EngineCoreOutput],
) -> None:
    """Stores drafts in the requests that got tokens, for their next step."""
    for output in outputs:
        drafts = draft_token_ids.get(output.request_id)
        request = requests.get(output.request_id)
        # If the request has a further step in flight, its drafts are too late: that step already
        # computes the token before them.
        if drafts and request is not None and request.num_computed_tokens < request.num_tokens:
            request.spec_token_ids = list(drafts)
