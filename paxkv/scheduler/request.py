"""Request: the scheduler's own record of one request, from arrival to end."""

import enum

from paxkv.contracts.engine_output import FinishReason
from paxkv.contracts.engine_request import EngineRequest
from paxkv.kv_cache.block_hash import BlockHash, BlockHasher


class RequestStatus(enum.IntEnum):
    """Where a request stands; every value after PREEMPTED is an end."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED_STOPPED = 3
    FINISHED_LENGTH_CAPPED = 4
    FINISHED_ABORTED = 5
    FINISHED_ERROR = 6


_FINISHED_STATUS: dict[FinishReason, RequestStatus] = {
    "stop": RequestStatus.FINISHED_STOPPED,
    "length": RequestStatus.FINISHED_LENGTH_CAPPED,
    "abort": RequestStatus.FINISHED_ABORTED,
    "error": RequestStatus.FINISHED_ERROR,
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
        "all_token_ids",
        "arrival_time",
        "block_hashes",
        "cache_salt",
        "eos_token_ids",
        "max_num_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "priority",
        "prompt_token_ids",
        "request_id",
        "sampling_params",
        "status",
        "stop_reason",
        "stop_token_ids",
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

        self.max_num_tokens = max_num_tokens
        self.eos_token_ids = frozenset(() if params.ignore_eos else engine_request.eos_token_ids)
        self.stop_token_ids = frozenset(params.stop_token_ids or ())

        self.status = RequestStatus.WAITING
        self.stop_reason: int | None = None
        self.all_token_ids = list(engine_request.prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        # Prompt tokens found in the prefix cache when it was first admitted.
        self.num_cached_tokens = 0

        self.block_hashes: list[BlockHash] = []
        self._block_hasher = block_hasher
        self._hash_full_blocks()

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def skip_reading_prefix_cache(self) -> bool:
        return self.sampling_params.skip_reading_prefix_cache

    @property
    def is_finished(self) -> bool:
        return self.status > RequestStatus.PREEMPTED

    @property
    def sort_key(self) -> tuple[int, float, str]:
        """Order under the priority policy, lowest first; the id only makes it total."""
        return (self.priority, self.arrival_time, self.request_id)

    def append_output_token(self, token_id: int) -> None:
        """Adds a sampled token, and the hash of the block that it may fill."""
        self.all_token_ids.append(token_id)
        self._hash_full_blocks()

    def finish(self, finish_reason: FinishReason, stop_reason: int | None = None) -> None:
        self.status = _FINISHED_STATUS[finish_reason]
        self.stop_reason = stop_reason

    def _hash_full_blocks(self) -> None:
        if self._block_hasher is not None:
            self._block_hasher.extend(self.block_hashes, self.all_token_ids, self.cache_salt)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, "
            f"num_prompt_tokens={self.num_prompt_tokens}, num_tokens={self.num_tokens}, "
            f"num_computed_tokens={self.num_computed_tokens})"
        )
