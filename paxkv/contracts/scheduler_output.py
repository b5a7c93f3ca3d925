"""What the scheduler decides for one step: the host's half of a step, sent to the runner."""

import dataclasses

from paxkv.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NewRequestData:
    """A request that the runner sees for the first time, in full.

    Args:
        block_ids: One list of physical block ids per KV cache group, prefix hits included.
        num_computed_tokens: Tokens whose K and V are in those blocks already.
    """

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CachedRequestData:
    """Requests that the runner knows already, as differences; the lists run in parallel.

    Args:
        resumed_req_ids: Those that come back after a preemption: their `new_block_ids` replace
            the block table instead of being appended to it.
        new_block_ids: Per request, new blocks per group, or None when there are none.
        num_computed_tokens: Tokens in the cache before this step.
        num_output_tokens: Output tokens that the scheduler has seen so far.
        all_token_ids: Prompt and output of each resumed request: the runner may have dropped it.
    """

    req_ids: list[str]
    resumed_req_ids: frozenset[str]
    new_block_ids: list[tuple[list[int], ...] | None]
    num_computed_tokens: list[int]
    num_output_tokens: list[int]
    all_token_ids: dict[str, list[int]]

    @property
    def num_reqs(self) -> int:
        return len(self.req_ids)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopy:
    """Copy one physical block over another, in every row, before anything is written."""

    source_block_id: int
    target_block_id: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """One step's decision.

    Args:
        num_scheduled_tokens: Tokens to compute now, per request id; at least 1 each.
        total_num_scheduled_tokens: Their sum, at most `max_num_batched_tokens`.
        preempted_req_ids: Requests that lost their blocks in this step.
        finished_req_ids: Requests that ended since the last step; the runner drops their rows.
        block_copies: Copy-on-write, to be done before the step's writes.
    """

    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    preempted_req_ids: frozenset[str]
    finished_req_ids: frozenset[str]
    block_copies: list[BlockCopy] = dataclasses.field(default_factory=list)
