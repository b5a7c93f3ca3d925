"""Rows of results that carry logits: for more log-probabilities than the device picks out.

Behind `RESULT_WIDTH` words stand the bits of the model's logits, f32[vocab], in which
`read_logprobs` finds them. Only an engine with `max_logprobs` above `MAX_LOGPROBS` has such rows.
"""

import numpy as np

from paxkv.config.engine_config import RunnerConfig
from paxkv.config.sampling_params import is_wide
from paxkv.runner.sampling.sampled_tokens import RESULT_WIDTH


def num_told_logits(config: RunnerConfig, vocab_size: int) -> int:
    """Logits of a token that the device hands over: all, or none."""
    return vocab_size if is_wide(config.max_logprobs) else 0


def result_width(num_logprobs: int | None, vocab_size: int) -> int:
    """Words of a row with which so many log-probabilities can be told."""
    return RESULT_WIDTH + (vocab_size if is_wide(num_logprobs) else 0)


def append_logits(
    result_np: np.ndarray,  # i32[max_draws, num_reqs or more, RESULT_WIDTH]
    logits_np: np.ndarray,  # f32[num_rows, vocab]
    first_draw_np: np.ndarray,  # i32[num_reqs], each request's first row of logits
) -> np.ndarray:  # i32[max_draws, num_reqs, RESULT_WIDTH + vocab]
    """Appends the logits that each draw had to the result of a step.

    Where a request has fewer draws than `max_draws`, any logits follow.
    """
    max_draws, num_reqs = len(result_np), len(first_draw_np)
    rows_np = first_draw_np + np.arange(max_draws, dtype=np.int32)[:, None]
    rows_np = np.minimum(rows_np, len(logits_np) - 1)
    bits_np = logits_np.view(np.int32)[rows_np]
    return np.concatenate([result_np[:, :num_reqs], bits_np], axis=2)
