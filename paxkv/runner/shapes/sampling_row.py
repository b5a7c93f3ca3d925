"""The columns of a row of sampling settings, which are int32 words."""

COLUMNS = (
    "temperature",  # f32 bits; 0 is greedy
    "top_p",  # f32 bits; 1 keeps all
    "min_p",  # f32 bits; 0 keeps all
    "presence_penalty",  # f32 bits; 0 is none
    "frequency_penalty",  # f32 bits; 0 is none
    "repetition_penalty",  # f32 bits; 1 is none
    "top_k",  # 0 keeps all
    "seed_high",
    "seed_low",
    "wants_logprobs",
    "processors",  # bits of `Processors`
    "num_prompt_tokens",
    "min_tokens_end",  # position from which a token may end the request; 0 is no minimum
    "row",  # in the `InputBatch` and in the `RowState`
)
NUM_COLUMNS = len(COLUMNS)
# Columns that a step adds for the sampler.
DRAW_POSITION = NUM_COLUMNS  # of the token that the row draws; 0 where it draws none
# Columns that exist only if a request may draw several tokens: the token before the drawn one, the
# index of the draw among the draws of its request, and the index of the request in the step.
GIVEN_ID, DRAW_IDX, DRAW_REQ = range(NUM_COLUMNS + 1, NUM_COLUMNS + 4)
NUM_FLOATS = COLUMNS.index("top_k")
TOP_K, SEED, WANTS_LOGPROBS, PROCESSORS, NUM_PROMPT_TOKENS, MIN_TOKENS_END, ROW = (
    COLUMNS.index(name)
    for name in (
        *("top_k", "seed_high", "wants_logprobs", "processors"),
        *("num_prompt_tokens", "min_tokens_end", "row"),
    )
)


def step_row_width(max_draws: int) -> int:
    """Columns of a row that a step leaves for the sampler, if requests draw up to `max_draws`."""
    return 1 + (DRAW_POSITION if max_draws == 1 else DRAW_REQ)
