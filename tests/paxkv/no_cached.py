"""`NO_CACHED`: the part of a `SchedulerOutput` about requests that ran before, without any."""

from paxkv.contracts.scheduler_output import CachedRequestData

NO_CACHED = CachedRequestData(
    req_ids=[],
    resumed_req_ids=frozenset(),
    new_block_ids=[],
    num_computed_tokens=[],
    num_output_tokens=[],
    all_token_ids={},
)
