"""Request: the scheduler's record of one request."""

import enum
import sys
from typing import Literal

from paxkv.config.cache_config import CacheConfig
from paxkv.config.sampling_params import is_wide
from paxkv.contracts.engine_output import FinishReason
from paxkv.contracts.engine_request import EngineRequest
from paxkv.contracts.kv_cache_spec import KVCacheConfig
from paxkv.kv_cache.hashing.block_hash import BlockHash, BlockHasher
from paxkv.kv_cache.hashing.extra_keys import extra_key_sources


class RequestStatus(enum.IntEnum):
    """The state of a request; every value after PREEMPTED means finished."""

    WAITING = 0
    # The request's grammar (a finite state machine) is not compiled yet.
    WAITING_FOR_FSM = 1
    # The KV connector is loading the request's blocks.
    WAITING_FOR_REMOTE_KVS = 2
    # The fork source has not computed the shared tokens yet.
    WAITING_FOR_FORK = 3
    RUNNING = 4
    PREEMPTED = 5
    FINISHED_STOPPED = 6
    FINISHED_LENGTH_CAPPED = 7
    FINISHED_ABORTED = 8
    FINISHED_ERROR = 9
    # Ended without running, because it could never run.
    FINISHED_IGNORED = 10


# Clients receive "length" as the finish reason of an ignored request, as in vLLM.
EndReason = FinishReason | Literal["ignored"]

_FINISHED_STATUS: dict[EndReason, RequestStatus] = {
    "stop": RequestStatus.FINISHED_STOPPED,
    "length": RequestStatus.FINISHED_LENGTH_CAPPED,
    "abort": RequestStatus.FINISHED_ABORTED,
    "error": RequestStatus.FINISHED_ERROR,
    "ignored": RequestStatus.FINISHED_IGNORED,
}

_FINISH_REASON: dict[RequestStatus, FinishReason] = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
    RequestStatus.FINISHED_IGNORED: "length",
}


class Request:
    """One request's tokens and progress; only the scheduler changes it.

    A step computes tokens from position `num_computed_tokens` on. Prefill and decode do not differ
    in any other way.

    Args:
        max_num_tokens: Number of prompt and output tokens at which the request ends.
        block_hasher: None without prefix caching; then there are no `block_hashes`.
    """

    __slots__ = (
        "_block_hasher",
        "_ends_from",
        "_extra_key_sources",
        "needs_single_steps",
        "_num_tokens_to_hash_at",
        "all_token_ids",
        "arrival_time",
        "bad_words_token_ids",
        "block_hashes",
        "cache_salt",
        "early_end_ids",
        "ending_token_ids",
        "eos_token_id",
        "fork_source",
        "is_pooled",
        "has_final_state",
        "is_streamed",
        "keep_blocks",
        "keeps_state_for_forks",
        "lora_name",
        "max_num_tokens",
        "min_tokens",
        "mm_features",
        "needs_grammar",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_leading_tokens",
        "num_output_placeholders",
        "num_plain_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "max_tokens_before_allocate",
        "checks_from_num_tokens",
        "priority",
        "prompt_token_ids",
        "request_id",
        "sampling_params",
        "scarce_token_ids",
        "spec_token_ids",
        "state_save_at",
        "status",
        "stop_reason",
    )

    def __init__(
        self,
        engine_request: EngineRequest,
        *,
        max_num_tokens: int,
        block_hasher: BlockHasher | None = None,
    ) -> None:
        params = engine_request.sampling_params
        self.request_id = engine_request.request_id
        self.prompt_token_ids = engine_request.prompt_token_ids
        self.num_prompt_tokens = len(engine_request.prompt_token_ids)
        self.sampling_params = params
        self.arrival_time = engine_request.arrival_time
        self.priority = engine_request.priority
        self.cache_salt = engine_request.cache_salt
        self.lora_name = engine_request.lora_name
        self.mm_features = engine_request.mm_features
        self.keep_blocks = engine_request.keep_blocks
        self.is_streamed = engine_request.is_streamed
        # The request whose blocks this one shares when it is first admitted, if any.
        self.fork_source: Request | None = None

        self.max_num_tokens = max_num_tokens
        # Forks of a request with one output token continue after its end, from its last state.
        self.keeps_state_for_forks = (
            self.keep_blocks and 1 < self.num_prompt_tokens < max_num_tokens - 1
        )
        self.num_leading_tokens = engine_request.num_leading_tokens
        # See `KVCacheManager.get_state_to_save`.
        self.state_save_at = 0
        # Whether the request has ended, and has no later state than that of its computed tokens.
        self.has_final_state = False
        eos_token_ids = () if params.ignore_eos else engine_request.eos_token_ids
        # The first EOS token ends the request without a stop reason. Further EOS tokens are
        # treated as stop tokens, and their id is the stop reason, as in vLLM.
        self.eos_token_id = eos_token_ids[0] if eos_token_ids else None
        # EOS and stop tokens in one set: a token that does not end the request costs one look-up.
        self.ending_token_ids = frozenset((*eos_token_ids, *(params.stop_token_ids or ())))
        self.min_tokens = params.min_tokens
        # Tokens forbidden below min_tokens. They include EOS also if EOS is ignored.
        self.early_end_ids = (
            (*dict.fromkeys((*engine_request.eos_token_ids, *(params.stop_token_ids or ()))),)
            if params.min_tokens > 0
            else ()
        )
        self.bad_words_token_ids = engine_request.bad_words_token_ids
        self.scarce_token_ids = frozenset(engine_request.scarce_token_ids)
        self.needs_grammar = engine_request.needs_grammar
        self.is_pooled = engine_request.is_pooled
        # True if the host works between samples (a grammar's mask, or a copy of all logits), or if
        # the request samples nothing. Such a request cannot be in a burst.
        self.needs_single_steps = is_wide(params.logprobs) or self.needs_grammar or self.is_pooled

        self.status = (
            RequestStatus.WAITING_FOR_FSM if engine_request.needs_grammar else RequestStatus.WAITING
        )
        self.stop_reason: int | str | None = None
        self.all_token_ids = list(engine_request.prompt_token_ids)
        self.num_computed_tokens = 0
        # Drafts after `all_token_ids`, which the next step verifies.
        self.spec_token_ids: list[int] = []
        # Tokens that steps still in flight will add to `all_token_ids`.
        self.num_output_placeholders = 0
        # See `set_tokens_before_allocate`.
        self.max_tokens_before_allocate = 0
        self.num_plain_tokens = 0
        self.num_preemptions = 0
        # Prompt tokens that were already computed at the first admission.
        self.num_cached_tokens = 0

        self.block_hashes: list[BlockHash] = []
        self._block_hasher = block_hasher
        self._extra_key_sources = extra_key_sources(engine_request)
        # `num_tokens` at which the next block is full.
        self._num_tokens_to_hash_at = sys.maxsize if block_hasher is None else 0
        # From this `num_tokens` on, any token may be the last.
        self._ends_from = 0 if self.scarce_token_ids else max_num_tokens
        # From this `num_tokens` on, any token may fill a block or be the last: the smaller of the
        # two numbers above, so that a decode step needs only one comparison.
        self.checks_from_num_tokens = self._ends_from
        if self.num_tokens >= self._num_tokens_to_hash_at:
            self._hash_full_blocks()

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_tokens_with_spec(self) -> int:
        return len(self.all_token_ids) + len(self.spec_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def skip_reading_prefix_cache(self) -> bool:
        # Prompt logprobs need the logits of every prompt token; cached tokens have no logits.
        params = self.sampling_params
        return params.skip_reading_prefix_cache or params.prompt_logprobs is not None

    @property
    def changes_logits(self) -> bool:
        """Whether the next token's logits are changed before it is sampled."""
        return self.sampling_params.changes_logits or (
            self.num_output_tokens + self.num_output_placeholders < self.min_tokens
        )

    @property
    def is_finished(self) -> bool:
        return self.status > RequestStatus.PREEMPTED

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the request ended; None while it is unfinished."""
        return _FINISH_REASON.get(self.status)

    @property
    def sort_key(self) -> tuple[int, float, str]:
        """Order under the priority policy, lowest first; the id makes keys unique."""
        return (self.priority, self.arrival_time, self.request_id)

    def set_tokens_before_allocate(self, num_tokens: int) -> None:
        """Stores the result of `KVCacheManager.get_max_tokens_before_allocate`.

        Also sets `num_plain_tokens`. A step that computes one of the first `num_plain_tokens`
        tokens needs no blocks, no grammar and no encoder, so the scheduler only counts it. The
        number is 0 for requests with a grammar or with encoder items. The last token of a request
        is not plain, because it is never computed.
        """
        self.max_tokens_before_allocate = num_tokens
        is_plain = not self.needs_grammar and not self.mm_features
        self.num_plain_tokens = min(num_tokens, self.max_num_tokens - 1) if is_plain else 0

    def may_be_ended_by(self, token_ids: list[int]) -> bool:
        """Whether one of these tokens may end the request, so each must be checked by itself."""
        num_tokens = len(self.all_token_ids) + len(token_ids)
        return num_tokens >= self._ends_from or not self.ending_token_ids.isdisjoint(token_ids)

    def has_token_left(self) -> bool:
        """Whether the request's settings allow any next token. The device forbids the same tokens.

        With the allowed token 21 and the bad word [21, 21], no token may follow the first 21.
        """
        if not self.scarce_token_ids:
            return True
        num_output_tokens = self.num_output_tokens
        banned = set(self.early_end_ids if num_output_tokens < self.min_tokens else ())
        for *before, last in self.bad_words_token_ids:
            num_before = len(before)
            if 0 < num_before <= num_output_tokens and self.all_token_ids[-num_before:] == before:
                banned.add(last)
        return not self.scarce_token_ids <= banned

    def append_output_tokens(self, token_ids: list[int]) -> None:
        """Appends sampled tokens, and the hashes of blocks that they fill."""
        self.all_token_ids += token_ids
        if len(self.all_token_ids) >= self._num_tokens_to_hash_at:
            self._hash_full_blocks()

    def finish(self, reason: EndReason, stop_reason: int | str | None = None) -> None:
        self.status = _FINISHED_STATUS[reason]
        self.stop_reason = stop_reason

    def _hash_full_blocks(self) -> None:
        hasher = self._block_hasher
        assert hasher is not None
        hasher.extend(self.block_hashes, self.all_token_ids, self._extra_key_sources)
        self._num_tokens_to_hash_at = (len(self.block_hashes) + 1) * hasher.block_size
        self.checks_from_num_tokens = min(self._ends_from, self._num_tokens_to_hash_at)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, "
            f"num_prompt_tokens={self.num_prompt_tokens}, num_tokens={self.num_tokens}, "
            f"num_computed_tokens={self.num_computed_tokens})"
        )


def make_block_hasher(
    cache_config: CacheConfig, kv_cache_config: KVCacheConfig
) -> BlockHasher | None:
    """Builds the hasher for the blocks of an engine's requests; None without prefix caching."""
    if not (cache_config.enable_prefix_caching and kv_cache_config.can_share_prefixes):
        return None
    return BlockHasher(
        block_size=kv_cache_config.resolved_hash_block_size,
        seed=cache_config.prefix_caching_seed,
        algorithm=cache_config.prefix_caching_hash_algo,
    )
