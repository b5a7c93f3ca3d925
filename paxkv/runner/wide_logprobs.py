"""More log-probabilities of a token than the device picks out: found on the host, from its logits.

A row of results that carries them is longer: behind `RESULT_WIDTH` words stand the bits of the
model's logits, f32[vocab]. Only an engine with `max_logprobs` above `MAX_LOGPROBS` has such rows.
"""

import numpy as np

from paxkv.config import RunnerConfig
from paxkv.contracts.runner_output import TokenLogprobs
from paxkv.runner.sampled_tokens import RESULT_WIDTH, read_logprobs
from paxkv.sampling_params import is_wide


def num_told_logits(config: RunnerConfig, vocab_size: int) -> int:
    """Logits of a token that the device hands over: all, or none."""
    return vocab_size if is_wide(config.max_logprobs) else 0


def result_width(num_logprobs: int | None, vocab_size: int) -> int:
    """Words of a row with which so many log-probabilities can be told."""
    return RESULT_WIDTH + (vocab_size if is_wide(num_logprobs) else 0)


def append_logits(
    result_np: np.ndarray,  # i32[1, num_rows, RESULT_WIDTH]
    logits_np: np.ndarray,  # f32[num_rows, vocab]
) -> np.ndarray:  # i32[1, num_rows, RESULT_WIDTH + vocab]
    """The result of a step whose rows carry logits too."""
    return np.concatenate([result_np, logits_np.view(np.int32)[None]], axis=2)


def read_any_logprobs(result_row_np: np.ndarray, num_logprobs: int) -> TokenLogprobs:
    """The log-probabilities of one row with the `num_logprobs` most likely; -1 is all of them."""
    if not is_wide(num_logprobs):
        return read_logprobs(result_row_np, num_logprobs)
    logits_np = result_row_np[RESULT_WIDTH:].copy().view(np.float32).astype(np.float64)
    shifted_np = logits_np - logits_np.max()
    logprobs_np = shifted_np - np.log(np.exp(shifted_np).sum())
    num_tokens = len(logits_np) if num_logprobs == -1 else num_logprobs
    # Stable: of equally likely tokens the lowest id comes first, as on the device.
    top_ids_np = np.argsort(-logits_np, kind="stable")[:num_tokens]
    token = read_logprobs(result_row_np, 0)
    return TokenLogprobs(
        token_logprob=token.token_logprob,
        token_rank=token.token_rank,
        top_token_ids=top_ids_np.tolist(),
        top_logprobs=logprobs_np[top_ids_np].tolist(),
    )
