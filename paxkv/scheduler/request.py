"""Request: the scheduler's own record of one request, from arrival to end."""

import enum
import sys
from typing import Literal

from paxkv.config.engine_config import CacheConfig
from paxkv.config.sampling_params import is_wide
from paxkv.contracts.engine_output import FinishReason
from paxkv.contracts.engine_request import EngineRequest
from paxkv.contracts.kv_cache_spec import KVCacheConfig
from paxkv.kv_cache.hashing.block_hash import BlockHash, BlockHasher
from paxkv.kv_cache.hashing.extra_keys import extra_key_sources


class RequestStatus(enum.IntEnum):
    """Where a request stands; every value after PREEMPTED is an end."""

    WAITING = 0
    # Its tokens are bound by a grammar (a finite state machine) that is not compiled yet.
    WAITING_FOR_FSM = 1
    # Its blocks are being loaded by the KV connector.
    WAITING_FOR_REMOTE_KVS = 2
    # What it shares with the request it is forked from is not computed yet.
    WAITING_FOR_FORK = 3
    RUNNING = 4
    PREEMPTED = 5
    FINISHED_STOPPED = 6
    FINISHED_LENGTH_CAPPED = 7
    FINISHED_ABORTED = 8
    FINISHED_ERROR = 9
    # Ended without having been run, because it never could be.
    FINISHED_IGNORED = 10


# How a request may end. Clients know an ignored one by its length, as in vLLM.
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

    A step computes tokens `num_computed_tokens` and following; there is no other difference
    between a prompt being computed and a token being decoded.

    Args:
        max_num_tokens: Prompt and output tokens at which it ends by its length.
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
        "is_streamed",
        "keep_blocks",
        "lora_name",
        "max_num_tokens",
        "min_tokens",
        "mm_features",
        "needs_grammar",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_output_placeholders",
        "num_plain_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tokens_before_block_work",
        "num_tokens_to_look_at",
        "priority",
        "prompt_token_ids",
        "request_id",
        "sampling_params",
        "scarce_token_ids",
        "spec_token_ids",
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
        # Whose blocks it is to share when it is first admitted; None when there is nobody.
        self.fork_source: Request | None = None

        self.max_num_tokens = max_num_tokens
        eos_token_ids = () if params.ignore_eos else engine_request.eos_token_ids
        # The one end that is not told by its id; further ones are stop tokens, as in vLLM.
        self.eos_token_id = eos_token_ids[0] if eos_token_ids else None
        # Of both kinds, so that a token that ends nothing costs one look-up.
        self.ending_token_ids = frozenset((*eos_token_ids, *(params.stop_token_ids or ())))
        self.min_tokens = params.min_tokens
        # The model's EOS too where it ends nothing: whoever asks for tokens wants others.
        self.early_end_ids = (
            (*dict.fromkeys((*engine_request.eos_token_ids, *(params.stop_token_ids or ()))),)
            if params.min_tokens > 0
            else ()
        )
        self.bad_words_token_ids = engine_request.bad_words_token_ids
        self.scarce_token_ids = frozenset(engine_request.scarce_token_ids)
        self.needs_grammar = engine_request.needs_grammar
        self.is_pooled = engine_request.is_pooled
        # Whether every draw needs the host, for a grammar's mask or to copy all logits; or the
        # request draws nothing.
        self.needs_single_steps = is_wide(params.logprobs) or self.needs_grammar or self.is_pooled

        self.status = (
            RequestStatus.WAITING_FOR_FSM if engine_request.needs_grammar else RequestStatus.WAITING
        )
        self.stop_reason: int | str | None = None
        self.all_token_ids = list(engine_request.prompt_token_ids)
        self.num_computed_tokens = 0
        # Drafts to be verified in its next step, behind `all_token_ids`.
        self.spec_token_ids: list[int] = []
        # Tokens that steps still in flight will add to `all_token_ids`.
        self.num_output_placeholders = 0
        # The scheduler's notes; see `note_block_work`.
        self.num_tokens_before_block_work = 0
        self.num_plain_tokens = 0
        self.num_preemptions = 0
        # Prompt tokens found in the prefix cache when it was first admitted.
        self.num_cached_tokens = 0

        self.block_hashes: list[BlockHash] = []
        self._block_hasher = block_hasher
        self._extra_key_sources = extra_key_sources(engine_request)
        # `num_tokens` at which the next block is full: a decode step compares one number.
        self._num_tokens_to_hash_at = sys.maxsize if block_hasher is None else 0
        # `num_tokens` from which on any token may be the last.
        self._ends_from = 0 if self.scarce_token_ids else max_num_tokens
        # The same for all that a token may do by its place: fill a block, or be the last.
        self.num_tokens_to_look_at = self._ends_from
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
        # Prompt logprobs need the logits of every prompt token, and a hit has none.
        params = self.sampling_params
        return params.skip_reading_prefix_cache or params.prompt_logprobs is not None

    @property
    def changes_logits(self) -> bool:
        """Whether the next token's logits are changed before it is drawn."""
        return self.sampling_params.changes_logits or (
            self.num_output_tokens + self.num_output_placeholders < self.min_tokens
        )

    @property
    def is_finished(self) -> bool:
        return self.status > RequestStatus.PREEMPTED

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None while it has not."""
        return _FINISH_REASON.get(self.status)

    @property
    def sort_key(self) -> tuple[int, float, str]:
        """Order under the priority policy, lowest first; the id only makes it total."""
        return (self.priority, self.arrival_time, self.request_id)

    def note_block_work(self, num_tokens: int) -> None:
        """Notes that up to so many tokens its blocks need no work; see `KVCacheManager`.

        From that follows what a scheduler looks at in most steps of most requests: a single token
        is plain, and needs nothing but to be counted, while it is among the first
        `num_plain_tokens`. Those who may wait for a grammar, or for something encoded, have none;
        and the last token of all is never computed.
        """
        self.num_tokens_before_block_work = num_tokens
        is_plain = not self.needs_grammar and not self.mm_features
        self.num_plain_tokens = min(num_tokens, self.max_num_tokens - 1) if is_plain else 0

    def may_be_ended_by(self, token_ids: list[int]) -> bool:
        """Whether one of these, to be appended, has to be looked at by itself."""
        num_tokens = len(self.all_token_ids) + len(token_ids)
        return num_tokens >= self._ends_from or not self.ending_token_ids.isdisjoint(token_ids)

    def has_token_left(self) -> bool:
        """Whether its settings leave any token that may come next; the device rules out the same.

        With [21] allowed and the bad word [21, 21] none is left behind the first.
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
        """Adds sampled tokens, and the hashes of the blocks that they may fill."""
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
        self.num_tokens_to_look_at = min(self._ends_from, self._num_tokens_to_hash_at)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, "
            f"num_prompt_tokens={self.num_prompt_tokens}, num_tokens={self.num_tokens}, "
            f"num_computed_tokens={self.num_computed_tokens})"
        )


def make_block_hasher(
    cache_config: CacheConfig, kv_cache_config: KVCacheConfig
) -> BlockHasher | None:
    """What names the blocks of an engine's requests; None without prefix caching."""
    if not cache_config.enable_prefix_caching:
        return None
    return BlockHasher(
        block_size=kv_cache_config.resolved_hash_block_size,
        seed=cache_config.prefix_caching_seed,
        algorithm=cache_config.prefix_caching_hash_algo,
    )
