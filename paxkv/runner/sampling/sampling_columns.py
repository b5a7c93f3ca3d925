"""Sampling settings of a request as a row of int32: written by NumPy, read under `jit`."""

import dataclasses
import enum
import hashlib

import jax
import jax.numpy as jnp
import numpy as np

from paxkv.config.sampling_params import SamplingParams
from paxkv.runner.shapes.sampling_row import (
    COLUMNS,
    DRAW_POSITION,
    MIN_TOKENS_END,
    NUM_COLUMNS,
    NUM_FLOATS,
    NUM_PROMPT_TOKENS,
    PROCESSORS,
    ROW,
    SEED,
    TOP_K,
    WANTS_LOGPROBS,
)


class Processors(enum.IntFlag):
    """The changes of a row's logits before a token is drawn."""

    TOKEN_HISTORY = 1  # penalties, bad words or drafts: the row's tokens are kept on the device
    PENALTIES = 2
    BAD_WORDS = 4  # of several tokens
    FORBIDDEN = 8  # allowed_token_ids, or bad words of one token
    BIAS = 16
    GRAMMAR = 32  # a row of a `GrammarBitmask` comes with each draw
    SHOWN = 64  # nothing, but the host gets all logits


NO_PROCESSORS = Processors(0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingInputs:
    """The sampler's settings of each row.

    Properties slice columns where they are used, under `jit`. A slice before a branch or a loop
    would be an argument of it, and a further kernel to compile.
    """

    rows: jax.Array  # i32[num_logits, NUM_COLUMNS or more], of `encode_sampling_params`
    draw_position: jax.Array  # i32[num_logits], position of the token to be drawn

    @property
    def temperature(self) -> jax.Array:  # f32[num_logits], 0 is greedy
        return self._float_column("temperature")

    @property
    def top_p(self) -> jax.Array:  # f32[num_logits], in (0, 1]
        return self._float_column("top_p")

    @property
    def min_p(self) -> jax.Array:  # f32[num_logits], in [0, 1]
        return self._float_column("min_p")

    @property
    def top_k(self) -> jax.Array:  # i32[num_logits], 0 keeps all
        return self.rows[:, TOP_K]

    @property
    def seed(self) -> tuple[jax.Array, jax.Array]:  # u32[num_logits] both, the high word first
        words = self.rows[:, SEED], self.rows[:, SEED + 1]
        high, low = (jax.lax.bitcast_convert_type(word, jnp.uint32) for word in words)
        return high, low

    @property
    def wants_logprobs(self) -> jax.Array:  # bool[num_logits]
        return self.rows[:, WANTS_LOGPROBS] != 0

    @property
    def is_drawn(self) -> jax.Array:  # bool[num_logits]
        """Whether the row draws a token. Position 0 is never drawn."""
        return self.draw_position > 0

    def _float_column(self, name: str) -> jax.Array:  # f32[num_logits]
        return jax.lax.bitcast_convert_type(self.rows[:, COLUMNS.index(name)], jnp.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessorInputs:
    """The settings of logits processors, one entry per row of logits."""

    presence_penalty: jax.Array  # f32[num_logits]
    frequency_penalty: jax.Array  # f32[num_logits]
    repetition_penalty: jax.Array  # f32[num_logits]
    processors: jax.Array  # i32[num_logits], bits of `Processors`; 0 where nothing is drawn
    num_prompt_tokens: jax.Array  # i32[num_logits]
    is_early: jax.Array  # bool[num_logits], whether tokens that end the request are banned
    row: jax.Array  # i32[num_logits], of the `RowState`
    draw_position: jax.Array  # i32[num_logits]

    def has(self, processors: Processors) -> jax.Array:  # bool[num_logits]
        """Rows that need any of these."""
        return (self.processors & int(processors)) != 0


def seed_of_request(engine_seed: int, req_id: str) -> int:
    """The seed of a request without a seed: the same in every run with the same request ids."""
    digest = hashlib.sha256(f"{engine_seed}\0{req_id}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def encode_sampling_params(
    params: SamplingParams,
    *,
    seed: int,
    vocab_size: int,
    num_prompt_tokens: int = 0,
    processors: Processors = NO_PROCESSORS,
) -> np.ndarray:  # i32[NUM_COLUMNS]
    """The request's row.

    A greedy request gets neutral filters, so that a batch of greedy requests skips them all.

    Args:
        seed: 64 signed bits, from the request or from `seed_of_request`.
        processors: The result of `processors_of`.
    """
    row_np = np.zeros(NUM_COLUMNS, np.int32)
    if params.is_greedy:
        filters = (0.0, 1.0, 0.0)
    else:
        filters = (params.temperature, params.top_p, params.min_p)
        row_np[TOP_K] = params.top_k if 0 < params.top_k < vocab_size else 0
    penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
    row_np[:NUM_FLOATS] = np.array([*filters, *penalties], np.float32).view(np.int32)
    row_np[SEED : SEED + 2] = np.array([seed >> 32, seed & 0xFFFFFFFF], np.int64).astype(np.int32)
    row_np[WANTS_LOGPROBS] = params.logprobs is not None
    row_np[PROCESSORS] = int(processors)
    row_np[NUM_PROMPT_TOKENS] = num_prompt_tokens
    if params.min_tokens > 0:
        row_np[MIN_TOKENS_END] = num_prompt_tokens + params.min_tokens
    return row_np


def join_step_rows(
    fields: dict[str, jax.Array], *, num_rows: int
) -> jax.Array:  # i32[num_rows, step_row_width]
    """A step's sampling rows for the sampler's program, under `jit`; unused rows are zeros."""
    columns = [fields["draw_position"]]
    if "draw_idx" in fields:
        given_ids = fields["token_ids"][fields["logits_indices"]]
        columns += [given_ids, fields["draw_idx"], fields["draw_req"]]
    rows = jnp.concatenate([fields["sampling_rows"], jnp.stack(columns, axis=1)], axis=1)
    return jnp.pad(rows, ((0, num_rows - rows.shape[0]), (0, 0)))


def decode_step_rows(
    sampling: jax.Array,  # i32[num_rows, step_row_width]
) -> SamplingInputs:
    """Inverse of `join_step_rows`, under `jit`."""
    return SamplingInputs(rows=sampling, draw_position=sampling[:, DRAW_POSITION])


def decode_processors(
    sampling: jax.Array,  # i32[num_rows, step_row_width]
) -> ProcessorInputs:
    """Reads the settings of processors from rows of `join_step_rows`, under `jit`."""
    floats = jax.lax.bitcast_convert_type(sampling[:, :NUM_FLOATS], jnp.float32)
    draw_position = sampling[:, DRAW_POSITION]
    is_drawn = draw_position > 0
    return ProcessorInputs(
        presence_penalty=floats[:, 3],
        frequency_penalty=floats[:, 4],
        repetition_penalty=floats[:, 5],
        processors=jnp.where(is_drawn, sampling[:, PROCESSORS], 0),
        num_prompt_tokens=sampling[:, NUM_PROMPT_TOKENS],
        is_early=is_drawn & (draw_position < sampling[:, MIN_TOKENS_END]),
        row=sampling[:, ROW],
        draw_position=draw_position,
    )


def needs_host_to_draw(
    sampling_rows_np: np.ndarray,  # i32[num_reqs, NUM_COLUMNS]
) -> np.ndarray:  # bool[num_reqs]
    """Whether each draw of a row needs the host, for a grammar's mask or to copy all logits."""
    return sampling_rows_np[:, PROCESSORS] & int(Processors.GRAMMAR | Processors.SHOWN) != 0
