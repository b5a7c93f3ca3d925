"""Settings that are read from environment variables: the API keys."""

import os
from collections.abc import Sequence

# The first variable that contains a key is used. The second variable is vLLM's.
API_KEY_VARIABLES = ("PAXKV_API_KEY", "VLLM_API_KEY")


def words_from_environment(variables: Sequence[str]) -> tuple[str, ...]:
    """The comma-separated words of the first variable that contains any; () if none does.

    A variable that is set but contains no word, as in `PAXKV_API_KEY=`, counts as not set.
    """
    for variable in variables:
        words = tuple(word.strip() for word in os.environ.get(variable, "").split(","))
        if any(words):
            return tuple(word for word in words if word)
    return ()
