"""What the runner answers for one step: sampled tokens, a ragged number per request."""

import dataclasses


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
        kv_connector_output: None without a connector.
    """

    req_ids: list[str]
    sampled_token_ids: list[list[int]]
    logprobs: list[list[TokenLogprobs] | None]
    prompt_logprobs: dict[str, list[TokenLogprobs]] = dataclasses.field(default_factory=dict)
    draft_token_ids: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    kv_connector_output: KVConnectorOutput | None = None


EMPTY_MODEL_RUNNER_OUTPUT = ModelRunnerOutput(req_ids=[], sampled_token_ids=[], logprobs=[])
