"""Messages of one step: the scheduler's `SchedulerOutput` and the runner's `ModelRunnerOutput`."""

import dataclasses

from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.engine_request import MultiModalFeature


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVTransfer:
    """Token positions of one request to load into its blocks, or to save from them.

    Args:
        block_ids: One list per KV cache group, starting with the request's first block. Entries of
            0, the null block, are not moved, because the group does not need them any more.
        start_token_idx: First token position to move.
        num_tokens: Number of token positions to move.
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
    """The full data of a request that the runner does not know yet.

    Args:
        block_ids: One list of physical block ids per KV cache group, including prefix hits. For a
            group of states, these are the blocks of the slot that the request writes. If it reads
            its state from another slot, the blocks of that slot come before them.
        num_computed_tokens: Tokens whose K and V are in these blocks already.
        ending_token_ids: Sampled tokens that end the request, once it has `min_tokens` outputs. In
            a burst the runner stops after such a token.
        early_end_ids: Tokens that must not be sampled before there are `min_tokens` outputs.
        bad_words_token_ids: Token sequences that must not occur in the output.
        needs_grammar: Sampling needs a row of a `GrammarBitmask` for each token.
        is_pooled: The request samples no token. It ends with a `pooler_output` when its prompt is
            computed.
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
    """Changes of requests that the runner knows already, as parallel lists.

    Args:
        resumed_req_ids: Requests that resume after a preemption. Their `new_block_ids` replace the
            block table instead of being appended to it.
        new_block_ids: Per request, the new blocks of each group; None if there are none. A new slot
            of states is written instead of the old one, from which the step reads. The lists must
            not be changed: a slot always has the same one.
        num_computed_tokens: Computed tokens before this step.
        num_output_tokens: Output tokens before this step, including tokens of steps in flight.
        all_token_ids: Prompt and output of each resumed request, because the runner may have
            dropped it.
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
    """Copy one physical block over another, in all layers, before the step writes anything."""

    source_block_id: int
    target_block_id: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """The scheduler's decision for one step.

    Args:
        num_scheduled_tokens: Request id -> number of tokens to compute now, at least 1.
        total_num_scheduled_tokens: Their sum; at most `max_num_batched_tokens`, except in a burst.
        num_decode_steps: Above 1 for a burst: this many decode steps, computed by one program.
            Every request computes at most one token per step, `num_scheduled_tokens` in all: its
            newest token, then the tokens that the burst samples. A request stops early if a sampled
            token ends it.
        preempted_req_ids: Requests that lost their blocks in this step.
        finished_req_ids: Requests that ended since the last step. The runner drops their rows.
        scheduled_spec_decode_tokens: Request id -> draft tokens to verify. They follow the
            request's own tokens, and `num_scheduled_tokens` includes them.
        scheduled_encoder_inputs: Request id -> indices of its `mm_features` to encode now.
        free_encoder_mm_hashes: Identifiers of encoder outputs that the runner should drop.
        num_common_prefix_blocks: Per KV cache group, the number of leading blocks that all running
            requests hold.
        block_copies: Copies to make before the step's writes.
        slot_switches: For requests that get a new slot of states in the middle of a burst: the
            position of the first token whose state is written there. The state before this token
            stays in the old slot. Without an entry, a new slot is written from the first token on.
        kv_connector_metadata: Transfers for the connector's worker half.
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
    slot_switches: dict[str, int] = dataclasses.field(default_factory=dict)
    kv_connector_metadata: KVConnectorMetadata | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities for one sampled token, before temperature and filters.

    Args:
        token_logprob: Log-probability of the sampled token.
        token_rank: Its rank; 1 for the most likely token.
        top_token_ids: The requested number of most likely tokens, most likely first.
        top_logprobs: Their log-probabilities.
    """

    token_logprob: float
    token_rank: int
    top_token_ids: list[int]
    top_logprobs: list[float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVConnectorOutput:
    """Transfers that a connector's worker half finished in one step.

    Args:
        finished_sending: Requests whose blocks are saved, so the blocks may be freed.
        finished_recving: Requests whose blocks are loaded, so the requests may run.
        invalid_block_ids: Blocks that could not be loaded. Their tokens are computed instead.
    """

    finished_sending: frozenset[str] = frozenset()
    finished_recving: frozenset[str] = frozenset()
    invalid_block_ids: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelRunnerOutput:
    """Sampled tokens of one step.

    Args:
        req_ids: The scheduled requests, in the runner's order.
        sampled_token_ids: Per request of `req_ids`, its new tokens: any number, and none while
            its prompt is not fully computed.
        logprobs: Per request of `req_ids`, one entry per sampled token; None if not requested.
        prompt_logprobs: Request id -> one entry per prompt token except the first. For requests
            that asked for them, in the step of their first token.
        draft_token_ids: Request id -> draft tokens that its next step verifies. If a step names any
            request here, even without drafts, the scheduler waits for the tokens of each step
            before it decides the next one.
        burst_drafts: Request id -> number of drafts and of accepted drafts, for each time that a
            burst verified drafts of the request.
        pooler_output: Request id -> result of a pooled request whose prompt is now computed.
        kv_connector_output: None without a connector.
    """

    req_ids: list[str]
    sampled_token_ids: list[list[int]]
    logprobs: list[list[TokenLogprobs] | None]
    prompt_logprobs: dict[str, list[TokenLogprobs]] = dataclasses.field(default_factory=dict)
    draft_token_ids: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    burst_drafts: dict[str, list[tuple[int, int]]] = dataclasses.field(default_factory=dict)
    pooler_output: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    kv_connector_output: KVConnectorOutput | None = None


EMPTY_MODEL_RUNNER_OUTPUT = ModelRunnerOutput(req_ids=[], sampled_token_ids=[], logprobs=[])
