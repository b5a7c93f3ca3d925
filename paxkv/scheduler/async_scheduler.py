"""AsyncScheduler: schedules a step before the previous step has returned its tokens."""

from paxkv.contracts.engine_output import EngineCoreOutput
from paxkv.contracts.scheduler_output import SchedulerOutput, TokenLogprobs
from paxkv.errors import InvariantError
from paxkv.scheduler.request import Request
from paxkv.scheduler.scheduler import Scheduler


class AsyncScheduler(Scheduler):
    """A scheduler that counts tokens of steps in flight as placeholders.

    A placeholder stands for a sampled token that the host has not received. The next step can
    compute this token, because it is in device memory. Its block can be hashed only when the host
    has received the token.

        prompt of 5     schedule 1: computes 0..4, then 1 placeholder
                        schedule 2: computes 5, whose token is not known, then 2 placeholders
                        update 1: 1 token known, 1 placeholder

    A burst returns one token for each token that it computes, or fewer if the request ends.

    A step that verifies drafts returns an unknown number of tokens, and a step that draws a token
    also returns the drafts for the next step. While there are drafts, the scheduler therefore
    schedules a request again only after its last draw has returned.

    Source: vLLM `v1/core/sched/async_scheduler.py`.
    """

    def _advance(self, output: SchedulerOutput, requests: dict[str, Request]) -> None:
        super()._advance(output, requests)
        if output.num_decode_steps > 1:
            for req_id, num_tokens in output.num_scheduled_tokens.items():
                requests[req_id].num_output_placeholders += num_tokens
            return
        if self.is_waiting_for_drafts:
            return
        for request in requests.values():
            num_placeholders = request.num_output_placeholders
            # A step that computes only a part of a prompt samples no token.
            is_drawn = not request.is_pooled
            num_known = len(request.all_token_ids) + num_placeholders
            if is_drawn and request.num_computed_tokens == num_known:
                request.num_output_placeholders = num_placeholders + 1

    def _append_tokens(
        self,
        request: Request,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None,
        num_wanted: int,
    ) -> EngineCoreOutput:
        if request.num_output_placeholders > 0:
            if len(token_ids) > num_wanted:
                raise InvariantError(
                    f"{request!r} got {len(token_ids)} tokens from a step without drafts; "
                    f"at most {num_wanted} were scheduled."
                )
            request.num_output_placeholders -= len(token_ids)
        num_hashes = len(request.block_hashes)
        output = super()._append_tokens(request, token_ids, logprobs, num_wanted)
        # When `allocate_slots` ran, the host did not know the last token of the block.
        if len(request.block_hashes) > num_hashes and output.finish_reason is None:
            manager = self.kv_cache_manager
            manager.cache_blocks(request, min(request.num_computed_tokens, request.num_tokens))
            if request.num_output_placeholders == 0:
                # With placeholders left, the token is computed later and fills the block then.
                request.set_tokens_before_allocate(manager.get_max_tokens_before_allocate(request))
        return output
