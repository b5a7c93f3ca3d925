"""Sampling settings of a request as a row of int32: written by NumPy, read under `jit`."""

import dataclasses
import hashlib

import jax
import jax.numpy as jnp
import numpy as np

from paxkv.sampling_params import SamplingParams

COLUMNS = (
    "temperature",  # f32 bits; 0 is greedy
    "top_p",  # f32 bits; 1 keeps all
    "min_p",  # f32 bits; 0 keeps all
    "top_k",  # 0 keeps all
    "seed_high",
    "seed_low",
    "wants_logprobs",
)
NUM_COLUMNS = len(COLUMNS)
# What a step leaves for the sampler of each row: its columns, and the place of what it draws.
STEP_ROW_WIDTH = NUM_COLUMNS + 1
_NUM_FLOATS = 3


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingInputs:
    """What the sampler knows of each row; a row depends on nothing but its own entries."""

    temperature: jax.Array  # f32[num_logits], 0 is greedy
    top_p: jax.Array  # f32[num_logits], in (0, 1]
    min_p: jax.Array  # f32[num_logits], in [0, 1]
    top_k: jax.Array  # i32[num_logits], 0 keeps all
    seed: jax.Array  # u32[num_logits, 2]
    draw_position: jax.Array  # i32[num_logits], place in its sequence of the token to be drawn
    wants_logprobs: jax.Array  # bool[num_logits]

    @property
    def is_drawn(self) -> jax.Array:  # bool[num_logits]
        """Whether the row draws at all: no token is drawn for the first place of a sequence."""
        return self.draw_position > 0


def seed_of_request(engine_seed: int, req_id: str) -> int:
    """The seed of a request that brings none: the same in every run with the same ids."""
    digest = hashlib.sha256(f"{engine_seed}\0{req_id}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def encode_sampling_params(
    params: SamplingParams, *, seed: int, vocab_size: int
) -> np.ndarray:  # i32[NUM_COLUMNS]
    """The request's row.

    A greedy request gets neutral filters, so that a batch of greedy requests skips them all.

    Args:
        seed: 64 signed bits, from the request or from `seed_of_request`.
    """
    row_np = np.zeros(NUM_COLUMNS, np.int32)
    if params.is_greedy:
        floats = (0.0, 1.0, 0.0)
    else:
        floats = (params.temperature, params.top_p, params.min_p)
        row_np[3] = params.top_k if 0 < params.top_k < vocab_size else 0
    row_np[:_NUM_FLOATS] = np.array(floats, np.float32).view(np.int32)
    row_np[4:6] = np.array([seed >> 32, seed & 0xFFFFFFFF], np.int64).astype(np.int32)
    row_np[6] = params.logprobs is not None
    return row_np


def decode_sampling_rows(
    rows: jax.Array,  # i32[num_logits, NUM_COLUMNS]
    draw_position: jax.Array,  # i32[num_logits]
) -> SamplingInputs:
    """Inverse of `encode_sampling_params`, under `jit`."""
    floats = jax.lax.bitcast_convert_type(rows[:, :_NUM_FLOATS], jnp.float32)
    return SamplingInputs(
        temperature=floats[:, 0],
        top_p=floats[:, 1],
        min_p=floats[:, 2],
        top_k=rows[:, 3],
        seed=jax.lax.bitcast_convert_type(rows[:, 4:6], jnp.uint32),
        draw_position=draw_position,
        wants_logprobs=rows[:, 6] != 0,
    )


def join_step_rows(
    fields: dict[str, jax.Array], *, max_num_seqs: int
) -> jax.Array:  # i32[max_num_seqs, STEP_ROW_WIDTH]
    """A step's sampling rows for the sampler's program, under `jit`; rows of nobody are zeros."""
    rows = jnp.concatenate([fields["sampling_rows"], fields["draw_position"][:, None]], axis=1)
    return jnp.pad(rows, ((0, max_num_seqs - rows.shape[0]), (0, 0)))


def decode_step_rows(
    sampling: jax.Array,  # i32[num_rows, STEP_ROW_WIDTH]
) -> SamplingInputs:
    """Inverse of `join_step_rows`, under `jit`."""
    return decode_sampling_rows(sampling[:, :NUM_COLUMNS], sampling[:, NUM_COLUMNS])
