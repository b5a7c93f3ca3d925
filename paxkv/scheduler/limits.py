"""RequestLimits: rejects requests that could never finish."""

import bisect
import dataclasses

from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.contracts.engine_request import EngineRequest
from paxkv.contracts.kv_cache_spec import CrossAttentionSpec, KVCacheConfig, KVCacheSpec
from paxkv.errors import (
    InvalidRequestError,
    NeverFitsError,
    PromptTooLongError,
    prompt_too_long,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Limits on the size of a request.

    Args:
        max_prompt_tokens: Longest prompt if prompts are not split over steps; None if they are.
        max_num_batched_tokens: Token budget of one step. With a sliding window it bounds how many
            tokens a request holds beyond the window.
        num_usable_blocks: Blocks of the pool that requests can get.
        kv_cache_specs: One per KV cache group.
        num_lookahead_tokens: Slots that a running request has beyond its tokens.
        max_encoder_tokens: Most encoder tokens of an item, such as an image. For an encoder-decoder
            model: most encoder tokens of all items of a request together.
    """

    max_model_len: int
    max_prompt_tokens: int | None
    max_num_batched_tokens: int
    num_usable_blocks: int
    kv_cache_specs: tuple[KVCacheSpec, ...]
    num_lookahead_tokens: int = 0
    max_encoder_tokens: int = 0

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the model encodes all items of a request before its first token."""
        return any(isinstance(spec, CrossAttentionSpec) for spec in self.kv_cache_specs)

    @property
    def max_tokens_that_fit(self) -> int:
        """Largest number of token positions that one request can hold in the whole pool.

        If every group has a window, the pool sets no limit; the result is then at least
        max_model_len.
        """
        # An upper bound: every block has the size of the largest one.
        most_tokens = self.num_usable_blocks * max(spec.block_size for spec in self.kv_cache_specs)
        candidates = range(1, max(most_tokens, self.max_model_len) + 1)
        return bisect.bisect_right(candidates, self.num_usable_blocks, key=self.required_blocks)

    def required_blocks(self, num_tokens: int) -> int:
        """Largest number of blocks that a request with `num_tokens` cached tokens holds at once."""
        return sum(
            spec.max_held_blocks(
                max_model_len=num_tokens,
                max_num_batched_tokens=self.max_num_batched_tokens + self.num_lookahead_tokens,
            )
            for spec in self.kv_cache_specs
        )

    def max_num_tokens(self, request: EngineRequest) -> int:
        """Number of prompt and output tokens at which the request ends with reason "length"."""
        max_tokens = request.sampling_params.max_tokens
        if max_tokens is None:
            return self.max_model_len
        return min(len(request.prompt_token_ids) + max_tokens, self.max_model_len)

    def check(self, request: EngineRequest) -> None:
        """Rejects a request that could never finish.

        Raises:
            InvalidRequestError: The prompt is empty.
            PromptTooLongError: The prompt leaves no room for a token within max_model_len, or is
                too long for one step and must not be split.
            NeverFitsError: The request needs more KV blocks than there are, so it would preempt
                itself forever; or one step cannot encode its items.
        """
        self._check_prompt(request)
        lengths = [feature.length for feature in request.mm_features]
        num_encoder_tokens = sum(lengths) if self.is_encoder_decoder else max(lengths, default=0)
        if num_encoder_tokens > self.max_encoder_tokens:
            raise NeverFitsError(
                f"{num_encoder_tokens} encoder tokens must be computed in one step, more than the "
                f"{self.max_encoder_tokens} that the encoder's budget, its cache and the model "
                "allow. Send a smaller item, or raise --max-num-encoder-input-tokens and "
                "--encoder-cache-size.",
                param="prompt",
            )
        # The last token is never computed, so it needs no slot.
        num_cache_tokens = min(
            self.max_num_tokens(request) - 1 + self.num_lookahead_tokens, self.max_model_len
        )
        num_blocks = self.required_blocks(num_cache_tokens)
        if num_blocks > self.num_usable_blocks:
            raise NeverFitsError(
                "the maximum context length that the KV cache has room for is exceeded: a prompt "
                f"of {len(request.prompt_token_ids)} tokens with max_tokens="
                f"{request.sampling_params.max_tokens} may need {num_blocks} KV cache blocks; "
                f"there are {self.num_usable_blocks}, for {self.max_tokens_that_fit} tokens. "
                "Lower max_tokens, shorten the prompt or give the KV cache more memory.",
                param="max_tokens",
            )

    def _check_prompt(self, request: EngineRequest) -> None:
        num_prompt_tokens = len(request.prompt_token_ids)
        if num_prompt_tokens == 0:
            raise InvalidRequestError("the prompt has no tokens; send at least 1.", param="prompt")
        if num_prompt_tokens >= self.max_model_len:
            raise PromptTooLongError(
                prompt_too_long(
                    str(num_prompt_tokens),
                    self.max_model_len - 1,
                    f"{self.max_model_len} tokens, of which at least one is for the answer",
                    "Shorten the prompt, or start the server with a larger --max-model-len.",
                ),
                param="prompt",
            )
        # A fork continues another request. If the blocks of that request are freed, the fork is
        # computed again and may be split, like a request that resumes after a preemption.
        may_split = self.max_prompt_tokens is None or request.fork_from is not None
        if not may_split and num_prompt_tokens > self.max_prompt_tokens:
            raise PromptTooLongError(
                prompt_too_long(
                    str(num_prompt_tokens),
                    self.max_prompt_tokens,
                    f"{self.max_model_len} tokens, but without chunked prefill a prompt must fit "
                    "in one step",
                    "Shorten the prompt, or start the server with chunked prefill or a larger "
                    "--max-num-batched-tokens.",
                ),
                param="prompt",
            )


def make_request_limits(
    scheduler_config: SchedulerConfig,
    kv_cache_config: KVCacheConfig,
    *,
    max_model_len: int,
    num_usable_blocks: int,
    num_lookahead_tokens: int,
) -> RequestLimits:
    """Derives `RequestLimits` from the settings and the pool."""
    specs = tuple(group.kv_cache_spec for group in kv_cache_config.kv_cache_groups)
    return RequestLimits(
        max_model_len=max_model_len,
        max_prompt_tokens=_max_prompt_tokens(scheduler_config),
        max_num_batched_tokens=scheduler_config.max_num_batched_tokens,
        num_usable_blocks=num_usable_blocks,
        kv_cache_specs=specs,
        num_lookahead_tokens=num_lookahead_tokens,
        max_encoder_tokens=min(
            scheduler_config.max_num_encoder_input_tokens,
            scheduler_config.encoder_cache_size,
            *(spec.max_encoder_tokens for spec in specs if isinstance(spec, CrossAttentionSpec)),
        ),
    )


def _max_prompt_tokens(config: SchedulerConfig) -> int | None:
    """Longest prompt that one step can compute; None if prompts are split over steps."""
    threshold = config.long_prefill_token_threshold
    is_split = config.enable_chunked_prefill or 0 < threshold <= config.max_num_batched_tokens
    return None if is_split else config.max_num_batched_tokens
