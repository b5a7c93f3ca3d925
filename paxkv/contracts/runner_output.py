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
class ModelRunnerOutput:
    """Sampled tokens of one step.

    Args:
        req_ids: The scheduled requests, in the runner's order.
        sampled_token_ids: Per request of `req_ids`, its new tokens; empty while its prompt is
            still being computed. Nothing may assume one token a step.
        logprobs: Per request of `req_ids`, one entry per sampled token, or None when not asked.
    """

    req_ids: list[str]
    sampled_token_ids: list[list[int]]
    logprobs: list[list[TokenLogprobs] | None]


EMPTY_MODEL_RUNNER_OUTPUT = ModelRunnerOutput(req_ids=[], sampled_token_ids=[], logprobs=[])
