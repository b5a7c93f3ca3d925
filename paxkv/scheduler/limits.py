"""Checks at the scheduler's door: requests that could wait forever are refused."""

import dataclasses

from paxkv.contracts.engine_request import EngineRequest
from paxkv.errors import InvalidRequestError, NeverFitsError, PromptTooLongError


def required_blocks(num_tokens: int, *, block_size: int, num_kv_cache_groups: int = 1) -> int:
    """Blocks that the K and V of `num_tokens` tokens need, over all KV cache groups."""
    return num_kv_cache_groups * -(-num_tokens // block_size)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What a request may ask of this scheduler.

    Args:
        max_prompt_tokens: Longest prompt that one step can take on; None is any, in pieces.
        num_usable_blocks: Blocks of the pool without the null block.
    """

    max_model_len: int
    max_prompt_tokens: int | None
    num_usable_blocks: int
    block_size: int
    num_kv_cache_groups: int

    @property
    def max_tokens_that_fit(self) -> int:
        """Most token positions that one request can hold in the whole pool."""
        return self.num_usable_blocks // self.num_kv_cache_groups * self.block_size

    def max_num_tokens(self, request: EngineRequest) -> int:
        """Number of prompt and output tokens at which the request ends by its length."""
        max_tokens = request.sampling_params.max_tokens
        if max_tokens is None:
            return self.max_model_len
        return min(len(request.prompt_token_ids) + max_tokens, self.max_model_len)

    def check(self, request: EngineRequest) -> None:
        """Refuses a request that could never run to its end.

        Raises:
            InvalidRequestError: The prompt is empty, or too long for one step where it must not
                be split.
            PromptTooLongError: The prompt leaves no room for a token within max_model_len.
            NeverFitsError: Even alone it would run out of KV blocks, and preempt itself forever.
        """
        num_prompt_tokens = len(request.prompt_token_ids)
        if num_prompt_tokens == 0:
            raise InvalidRequestError("the prompt has no tokens; send at least 1.", param="prompt")
        if num_prompt_tokens >= self.max_model_len:
            raise PromptTooLongError(
                f"prompt has {num_prompt_tokens} tokens; with max_model_len="
                f"{self.max_model_len} it may have {self.max_model_len - 1}. "
                "Shorten the prompt or start the server with a larger --max-model-len.",
                param="prompt",
            )
        if self.max_prompt_tokens is not None and num_prompt_tokens > self.max_prompt_tokens:
            raise InvalidRequestError(
                f"prompt has {num_prompt_tokens} tokens; without chunked prefill a prompt must "
                f"fit in one step of {self.max_prompt_tokens} tokens. Shorten the prompt, or "
                "start the server with chunked prefill or a larger --max-num-batched-tokens.",
                param="prompt",
            )
        # The last token of all is never fed back, so it needs no slot.
        num_cache_tokens = self.max_num_tokens(request) - 1
        num_blocks = required_blocks(
            num_cache_tokens,
            block_size=self.block_size,
            num_kv_cache_groups=self.num_kv_cache_groups,
        )
        if num_blocks > self.num_usable_blocks:
            raise NeverFitsError(
                f"prompt of {num_prompt_tokens} tokens with max_tokens="
                f"{request.sampling_params.max_tokens} may need {num_blocks} KV cache blocks; "
                f"there are {self.num_usable_blocks}, for {self.max_tokens_that_fit} tokens. "
                "Lower max_tokens, shorten the prompt or give the KV cache more memory.",
                param="max_tokens",
            )
