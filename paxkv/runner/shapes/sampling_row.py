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
# What a step leaves for the sampler of each row: its columns, and the place of what it draws.
STEP_ROW_WIDTH = NUM_COLUMNS + 1
NUM_FLOATS = COLUMNS.index("top_k")
TOP_K, SEED, WANTS_LOGPROBS, PROCESSORS, NUM_PROMPT_TOKENS, MIN_TOKENS_END, ROW = (
    COLUMNS.index(name)
    for name in (
        *("top_k", "seed_high", "wants_logprobs", "processors"),
        *("num_prompt_tokens", "min_tokens_end", "row"),
    )
)
