"""Tokens and log-probabilities come back bit for bit from one int32 array."""

import jax
import numpy as np

from paxkv.runner.sampling.sampled_tokens import (
    MAX_LOGPROBS,
    RESULT_WIDTH,
    SampledTokens,
    pack_result,
    read_logprobs,
)


def test_round_trip():
    rng = np.random.default_rng(0)
    top_ids_np = rng.integers(0, 1000, (3, MAX_LOGPROBS), dtype=np.int32)
    top_logprobs_np = rng.normal(size=(3, MAX_LOGPROBS)).astype(np.float32)
    sampled = SampledTokens(
        token_ids=np.array([5, 6, 7], np.int32),
        logprobs=np.array([-0.5, -np.inf, -3.25], np.float32),
        ranks=np.array([1, 2, 3], np.int32),
        top_token_ids=top_ids_np,
        top_logprobs=top_logprobs_np,
    )
    result_np = jax.device_get(jax.jit(pack_result)(sampled))
    assert result_np.shape == (3, RESULT_WIDTH) and result_np.dtype == np.int32
    assert result_np[:, 0].tolist() == [5, 6, 7]
    row = read_logprobs(result_np[2], 4)
    assert (row.token_logprob, row.token_rank) == (-3.25, 3)
    assert row.top_token_ids == top_ids_np[2, :4].tolist()
    assert row.top_logprobs == top_logprobs_np[2, :4].tolist()
    assert read_logprobs(result_np[1], 0).top_token_ids == []
    assert read_logprobs(result_np[1], 0).token_logprob == -np.inf
