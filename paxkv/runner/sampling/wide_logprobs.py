"""Result rows with logits, for more log-probabilities than the device selects.

After `RESULT_WIDTH` words, a row has the bits of the model's logits, f32[vocab]. `read_logprobs`
computes the log-probabilities from them. Only engines with `max_logprobs` above `MAX_LOGPROBS` have
such rows.
"""

import numpy as np

from paxkv.config.runner_config import RunnerConfig
from paxkv.config.sampling_params import is_wide
from paxkv.runner.sampling.sampled_tokens import RESULT_WIDTH


def num_returned_logits(config: RunnerConfig, vocab_size: int) -> int:
    """Number of logits that the host fetches for each token: the size of the vocabulary, or 0."""
    return vocab_size if is_wide(config.max_logprobs) else 0


def result_width(num_logprobs: int | None, vocab_size: int) -> int:
    """Row width, in int32 words, for `num_logprobs` log-probabilities."""
    return RESULT_WIDTH + (vocab_size if is_wide(num_logprobs) else 0)


def append_logits(
    result_np: np.ndarray,  # i32[max_draws, num_reqs or more, RESULT_WIDTH]
    logits_np: np.ndarray,  # f32[num_rows, vocab]
    first_draw_np: np.ndarray,  # i32[num_reqs], each request's first row of logits
) -> np.ndarray:  # i32[max_draws, num_reqs, RESULT_WIDTH + vocab]
    """Appends the logits of each draw to the result of a step.

    The logits of draws that a request does not have are arbitrary.
    """
    max_draws, num_reqs = len(result_np), len(first_draw_np)
    rows_np = first_draw_np + np.arange(max_draws, dtype=np.int32)[:, None]
    rows_np = np.minimum(rows_np, len(logits_np) - 1)
    bits_np = logits_np.view(np.int32)[rows_np]
    return np.concatenate([result_np[:, :num_reqs], bits_np], axis=2)
