"""What sampled tokens do to a request: it grows, and perhaps stops."""

from collections.abc import Sequence

from paxkv.contracts.engine_output import EngineCoreOutput, FinishReason
from paxkv.contracts.runner_output import TokenLogprobs
from paxkv.scheduler.request import Request


def check_stop(request: Request) -> tuple[FinishReason, int | None] | None:
    """Whether the last token ends the request, which has at least one output token.

    Stop strings are found where text is made, and come back as `Scheduler.finish_requests`.

    Returns:
        Finish reason and stop reason; None when the request goes on.
    """
    # Length is checked also below min_tokens: there is no room for another token.
    if request.num_output_tokens >= request.sampling_params.min_tokens:
        last_token_id = request.all_token_ids[-1]
        if last_token_id in request.eos_token_ids:
            return "stop", None
        if last_token_id in request.stop_token_ids:
            return "stop", last_token_id
    if request.num_tokens >= request.max_num_tokens:
        return "length", None
    return None


def append_until_stop(
    request: Request,
    sampled_token_ids: Sequence[int],
    logprobs: list[TokenLogprobs] | None,
) -> EngineCoreOutput:
    """Adds a step's tokens to a request, up to and with the one that ends it.

    A request that ends has its `status` and `stop_reason` set; its blocks are the caller's.

    Args:
        sampled_token_ids: At least one. Those after the end are dropped.
        logprobs: One entry per sampled token, or None.
    """
    finish_reason, stop_reason = None, None
    num_kept = 0
    for token_id in sampled_token_ids:
        request.append_output_token(token_id)
        num_kept += 1
        if (stop := check_stop(request)) is not None:
            finish_reason, stop_reason = stop
            request.finish(finish_reason, stop_reason)
            break
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=list(sampled_token_ids[:num_kept]),
        logprobs=None if logprobs is None else logprobs[:num_kept],
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        num_cached_tokens=request.num_cached_tokens,
    )
