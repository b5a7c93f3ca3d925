"""How many tokens a client has heard of, and how long each was waited for."""

import dataclasses

# Upper bounds of the buckets of waits for a token; those of vLLM.
TOKEN_BUCKETS_S = (
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
    + (7.5, 10.0, 20.0, 40.0, 80.0)
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenTotals:
    """Of all requests since the client began, whatever became of them and of their engines.

    Args:
        num_prompt_tokens: Of prompts whose first token has come; n completions, and the steps of a
            beam search, count theirs once.
        num_cached_prompt_tokens: Those of them that came from the prefix cache.
        num_recomputed_prompt_tokens: Last tokens of prompts of which all others came from there:
            one token at least is computed.
        num_generation_tokens: Tokens drawn.
        token_latency_counts: Tokens that were not a completion's first, by how long after the one
            before them they came: in each bucket alone of `TOKEN_BUCKETS_S`, and later.
        token_latency_sum_s: What they took together.
        engines: Where several engines count as one: those of each, in their order.
    """

    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_recomputed_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    token_latency_counts: tuple[int, ...] = (0,) * (len(TOKEN_BUCKETS_S) + 1)
    token_latency_sum_s: float = 0.0
    engines: tuple["TokenTotals", ...] = ()

    @property
    def num_computed_prompt_tokens(self) -> int:
        return self.num_prompt_tokens - self.num_cached_prompt_tokens
