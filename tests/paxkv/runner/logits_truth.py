"""The slow truth of logits processors: one request, one token after the other, in float64."""

from collections.abc import Sequence

import numpy as np

from paxkv.config.sampling_params import SamplingParams


def true_logits(
    logits_np: np.ndarray,  # f[vocab]
    params: SamplingParams,
    prompt: Sequence[int],
    outputs: Sequence[int],
    *,
    bad_words: Sequence[Sequence[int]] = (),
    early_end_ids: Sequence[int] = (),
    grammar: Sequence[int] | None = None,
) -> np.ndarray:  # f64[vocab]
    """The logits from which the next token is drawn, as vLLM defines them."""
    x = logits_np.astype(np.float64)
    vocab = range(len(x))
    for token_id in vocab:
        if grammar is not None and token_id not in grammar:
            x[token_id] = -np.inf
        if params.allowed_token_ids is not None and token_id not in params.allowed_token_ids:
            x[token_id] = -np.inf
    for word in bad_words:
        *before, last = word
        if list(outputs[len(outputs) - len(before) :]) == before and len(before) <= len(outputs):
            x[last] = -np.inf
    for token_id, bias in (params.logit_bias or {}).items():
        x[token_id] += bias
    if len(outputs) < params.min_tokens:
        x[list(early_end_ids)] = -np.inf
    for token_id in {*prompt, *outputs}:
        factor = params.repetition_penalty
        x[token_id] = x[token_id] / factor if x[token_id] > 0 else x[token_id] * factor
    for token_id in outputs:
        x[token_id] -= params.frequency_penalty
    for token_id in set(outputs):
        x[token_id] -= params.presence_penalty
    return x
