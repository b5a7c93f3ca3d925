"""One step between scheduler and runner: what the scheduler decides and what the runner answers."""

import dataclasses

from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.engine_request import MultiModalFeature


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVTransfer:
    """Blocks of one request to load or to save, whole or in part.

    Args:
        block_ids: One list per KV cache group, from the request's first block on; 0, the null
            block, where the group needs none any more: nothing is moved there.
        start_token_idx: First token position to move.
        num_tokens: Token positions to move.
    """

    request_id: str
    block_ids: tuple[list[int], ...]
    start_token_idx: int
    num_tokens: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVConnectorMetadata:
    """One step's transfers, for the connector's worker half."""

    loads: list[KVTransfer]
    saves: list[KVTransfer]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NewRequestData:
    """A request that the runner sees for the first time, in full.

    Args:
        block_ids: One list of physical block ids per KV cache group, prefix hits included.
        num_computed_tokens: Tokens whose K and V are in those blocks already.
        ending_token_ids: Sampled tokens that end the request, from `min_tokens` outputs on. In a
            burst the runner stops there.
        early_end_ids: Tokens that are not drawn before there are `min_tokens` outputs.
        bad_words_token_ids: Token sequences that the output may not have.
        needs_grammar: Each of its draws waits for a row of a `GrammarBitmask`.
        is_pooled: It draws no token. It ends with a `pooler_output` when its prompt is computed.
    """

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int
    ending_token_ids: tuple[int, ...] = ()
    early_end_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    needs_grammar: bool = False
    is_pooled: bool = False
    lora_name: str | None = None
    mm_features: tuple[MultiModalFeature, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CachedRequestData:
    """Requests that the runner knows already, as differences; the lists run in parallel.

    Args:
        resumed_req_ids: Those that come back after a preemption: their `new_block_ids` replace
            the block table instead of being appended to it.
        new_block_ids: Per request, new blocks per group, or None when there are none.
        num_computed_tokens: Tokens in the cache before this step.
        num_output_tokens: Output tokens before this step, with those that steps still in flight
            bring.
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
        total_num_scheduled_tokens: Their sum, at most `max_num_batched_tokens` but in a burst.
        num_decode_steps: More than 1 is a burst: that many decode steps, computed as one. Every
            request has one token that is known, or on the device, and computes it and those that
            the burst itself samples: `num_scheduled_tokens` of them, at most one a step. It ends
            earlier where a sampled token ends the request, as `Request` would.
        preempted_req_ids: Requests that lost their blocks in this step.
        finished_req_ids: Requests that ended since the last step; the runner drops their rows.
        scheduled_spec_decode_tokens: Draft tokens to verify, per request that has any; they count
            among its `num_scheduled_tokens`, behind its own.
        scheduled_encoder_inputs: Per request, indices of its `mm_features` to encode now.
        free_encoder_mm_hashes: Encoder outputs that nobody needs any more, by identifier.
        num_common_prefix_blocks: Per KV cache group, leading blocks that all running requests hold.
        block_copies: Copy-on-write, to be done before the step's writes.
        new_block_ids_to_zero: Blocks handed out since the last step whose old bytes must not be
            read, not even masked; set to zero before the step's writes. Only where a model's
            groups read one memory as different dtypes (Mamba beside attention).
        kv_connector_metadata: What the connector's worker half is to load and save.
    """

    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    preempted_req_ids: frozenset[str]
    finished_req_ids: frozenset[str]
    num_decode_steps: int = 1
    scheduled_spec_decode_tokens: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    scheduled_encoder_inputs: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    free_encoder_mm_hashes: list[str] = dataclasses.field(default_factory=list)
    num_common_prefix_blocks: list[int] = dataclasses.field(default_factory=list)
    block_copies: list[BlockCopy] = dataclasses.field(default_factory=list)
    new_block_ids_to_zero: list[int] = dataclasses.field(default_factory=list)
    kv_connector_metadata: KVConnectorMetadata | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities at one drawn token, before temperature and filters.

    Args:
        token_logprob: Of the drawn token.
        token_rank: 1 for the most likely token.
        top_token_ids: The most likely tokens, as many as were asked for, best first.
        top_logprobs: Their log-probabilities.
    """

    token_logprob: float
    token_rank: int
    top_token_ids: list[int]
    top_logprobs: list[float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVConnectorOutput:
    """What a connector's worker half finished in one step.

    Args:
        finished_sending: Requests whose blocks have been saved: they may be freed now.
        finished_recving: Requests whose blocks have been loaded: they may run now.
        invalid_block_ids: Blocks that could not be loaded; what they hold is computed instead.
    """

    finished_sending: frozenset[str] = frozenset()
    finished_recving: frozenset[str] = frozenset()
    invalid_block_ids: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelRunnerOutput:
    """Sampled tokens of one step.

    Args:
        req_ids: The scheduled requests, in the runner's order.
        sampled_token_ids: Per request of `req_ids`, its new tokens; empty while its prompt is
            still being computed. Nothing may assume one token a step.
        logprobs: Per request of `req_ids`, one entry per sampled token, or None when not asked.
        prompt_logprobs: Of the requests that asked for them and got their first token in this step:
            an entry for each token of the prompt but the first.
        draft_token_ids: Per request that has any, tokens to be verified in its next step.
        pooler_output: Per pooled request whose prompt is computed now, what its client asked for.
        kv_connector_output: None without a connector.
    """

    req_ids: list[str]
    sampled_token_ids: list[list[int]]
    logprobs: list[list[TokenLogprobs] | None]
    prompt_logprobs: dict[str, list[TokenLogprobs]] = dataclasses.field(default_factory=dict)
    draft_token_ids: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    pooler_output: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    kv_connector_output: KVConnectorOutput | None = None


EMPTY_MODEL_RUNNER_OUTPUT = ModelRunnerOutput(req_ids=[], sampled_token_ids=[], logprobs=[])
