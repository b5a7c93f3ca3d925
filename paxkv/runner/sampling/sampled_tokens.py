"""The sampled tokens of a step as one int32 array: packed under `jit`, read by NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from paxkv.config.sampling_params import MAX_LOGPROBS, is_wide
from paxkv.contracts.scheduler_output import TokenLogprobs

# token, its logprob, its rank, then the most likely tokens and their logprobs.
RESULT_WIDTH = 3 + 2 * MAX_LOGPROBS
# Stands for the token of a row that drew none, such as a row of a burst that has ended.
NO_TOKEN = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SampledTokens:
    """One drawn token per row. Log-probabilities are zeros unless a row asks for them."""

    token_ids: jax.Array  # i32[num_logits]
    logprobs: jax.Array  # f32[num_logits], of the drawn token, before temperature and filters
    ranks: jax.Array  # i32[num_logits], 1 for the most likely token
    top_token_ids: jax.Array  # i32[num_logits, MAX_LOGPROBS], most likely first
    top_logprobs: jax.Array  # f32[num_logits, MAX_LOGPROBS]


def pack_result(sampled: SampledTokens) -> jax.Array:  # i32[num_logits, RESULT_WIDTH]
    """Packs everything into one array, so that the host needs one fetch."""

    def bits(x: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(x, jnp.int32)

    return jnp.concatenate(
        [
            sampled.token_ids[:, None],
            bits(sampled.logprobs)[:, None],
            sampled.ranks[:, None],
            sampled.top_token_ids,
            bits(sampled.top_logprobs),
        ],
        axis=1,
    )


def unpack_result(
    packed: jax.Array,  # i32[num_logits, RESULT_WIDTH]
) -> SampledTokens:
    """Inverse of `pack_result`, under `jit`."""
    top_start, bits_start = 3, 3 + MAX_LOGPROBS

    def floats(bits: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(bits, jnp.float32)

    return SampledTokens(
        token_ids=packed[:, 0],
        logprobs=floats(packed[:, 1]),
        ranks=packed[:, 2],
        top_token_ids=packed[:, top_start:bits_start],
        top_logprobs=floats(packed[:, bits_start:]),
    )


def read_logprobs(
    result_row_np: np.ndarray,  # i32[RESULT_WIDTH], or longer where it carries logits
    num_logprobs: int,
) -> TokenLogprobs:
    """Reads the log-probabilities of one row of a fetched result.

    Args:
        num_logprobs: How many of the most likely tokens to return; -1 returns all. If it exceeds
            what the device selects, they are computed from the row's logits, whose f32 bits follow
            `RESULT_WIDTH` words.
    """
    if is_wide(num_logprobs):
        token = read_logprobs(result_row_np, 0)
        top_ids_np, top_logprobs_np = _find_top(result_row_np[RESULT_WIDTH:], num_logprobs)
        return dataclasses.replace(
            token, top_token_ids=top_ids_np.tolist(), top_logprobs=top_logprobs_np.tolist()
        )
    top_start, bits_start = 3, 3 + MAX_LOGPROBS
    # A copy, because a view of other dtype needs contiguous memory.
    top_bits_np = result_row_np[bits_start : bits_start + num_logprobs].copy()
    return TokenLogprobs(
        token_logprob=float(result_row_np[1:2].view(np.float32)[0]),
        token_rank=int(result_row_np[2]),
        top_token_ids=result_row_np[top_start : top_start + num_logprobs].tolist(),
        top_logprobs=top_bits_np.view(np.float32).tolist(),
    )


def _find_top(
    logit_bits_np: np.ndarray,  # i32[vocab]
    num_logprobs: int,
) -> tuple[np.ndarray, np.ndarray]:  # i64[num_top], f64[num_top]
    logits_np = logit_bits_np.copy().view(np.float32).astype(np.float64)
    shifted_np = logits_np - logits_np.max()
    logprobs_np = shifted_np - np.log(np.exp(shifted_np).sum())
    num_top = len(logits_np) if num_logprobs == -1 else num_logprobs
    # Stable: of equally likely tokens the lowest id comes first, as on the device.
    top_ids_np = np.argsort(-logits_np, kind="stable")[:num_top]
    return top_ids_np, logprobs_np[top_ids_np]
