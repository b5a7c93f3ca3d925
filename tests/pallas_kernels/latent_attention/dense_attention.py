"""Latent attention by its definition, in float64 NumPy: the results that bodies must have."""

import numpy as np

from pallas_kernels.latent_attention.cases import LatentAttentionInputs


def dense_attention(
    inputs: LatentAttentionInputs,
) -> tuple[np.ndarray, np.ndarray]:
    """Computes attention of one token at a time, on contiguous vectors.

    Returns the outputs, f64[num_tokens, num_q_heads, latent_dim], and the logarithms of the sums of
    exponentials, f64[num_tokens, num_q_heads]. Without keys, they are 0 and minus infinity.
    """
    q = inputs.q_np.astype(np.float64)
    query_start_loc = np.asarray(inputs.query_start_loc)
    latent_dim = inputs.q_latent.shape[-1]
    out, lse = np.zeros((*q.shape[:2], latent_dim)), np.full(q.shape[:2], -np.inf)
    for req_idx, cached in enumerate(inputs.cached_np):
        start, end = query_start_loc[req_idx : req_idx + 2]
        for token in range(start, end):
            seen = cached[: len(cached) - (end - 1 - token)].astype(np.float64)
            if len(seen):
                weights = np.exp(inputs.rules["scale"] * q[token] @ seen.T)
                out[token] = weights @ seen[:, :latent_dim] / weights.sum(axis=1, keepdims=True)
                lse[token] = np.log(weights.sum(axis=1))
    return out, lse
