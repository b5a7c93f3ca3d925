"""What a compiled generation takes: its static sizes, and the arrays of its rows."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from paxkv.contracts.engine_request import EngineRequest
from paxkv.errors import ConfigError, InvalidRequestError
from paxkv.runner.sampling.row_state import num_row_words, pack_row, processors_of
from paxkv.runner.sampling.sampling_columns import encode_sampling_params, seed_of_request
from paxkv.runner.shapes.sampling_row import NUM_COLUMNS, PROCESSORS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GenerateShape:
    """Every static number of a compiled generation.

    Args:
        batch_size: Rows, each one prompt.
        max_prompt_len: Most tokens of a prompt.
        max_new_tokens: Most tokens generated for a row.
        block_size: Token positions in a KV block.
        max_stop_ids: Most token ids that end a row.
    """

    batch_size: int
    max_prompt_len: int
    max_new_tokens: int
    block_size: int = 16
    max_stop_ids: int = 8

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{field.name} must be an integer of at least 1, got {value!r}.")

    @property
    def max_tokens_per_row(self) -> int:
        return self.max_prompt_len + self.max_new_tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateInputs:
    """The arrays that a compiled generation takes; a row with prompt length 0 generates nothing."""

    prompt_token_ids: jax.Array  # i32[batch_size, max_prompt_len], anything past the prompt's end
    prompt_lens: jax.Array  # i32[batch_size], in [0, max_prompt_len]
    max_new_tokens: jax.Array  # i32[batch_size], in [1, max_new_tokens]
    stop_token_ids: jax.Array  # i32[batch_size, max_stop_ids], vocab size where there is none
    sampling_rows: jax.Array  # i32[batch_size, NUM_COLUMNS], by `encode_sampling_params`
    # i32[batch_size, num_row_words], by `pack_row`, with `max_tokens_per_row` as its max_model_len:
    # what changes logits before a draw. None is nothing, whatever the sampling rows say, and makes
    # another program, without any of that.
    packed_rows: jax.Array | None = None


def make_generate_inputs(
    requests: Sequence[EngineRequest], shape: GenerateShape, *, vocab_size: int, seed: int
) -> GenerateInputs:
    """The arrays of these requests on the host, one row each in their order, then empty rows.

    Args:
        requests: At most `batch_size`, each with a prompt of at most `max_prompt_len` tokens.
        seed: Of requests that bring none.

    Raises:
        InvalidRequestError: A request has more stop tokens than fit the shape.
    """
    prompt_token_ids_np = np.zeros((shape.batch_size, shape.max_prompt_len), np.int32)
    prompt_lens_np = np.zeros(shape.batch_size, np.int32)
    max_new_tokens_np = np.ones(shape.batch_size, np.int32)
    stop_token_ids_np = np.full((shape.batch_size, shape.max_stop_ids), vocab_size, np.int32)
    sampling_rows_np = np.zeros((shape.batch_size, NUM_COLUMNS), np.int32)
    packed_rows_np = None
    for row, request in enumerate(requests):
        prompt, params = request.prompt_token_ids, request.sampling_params
        prompt_token_ids_np[row, : len(prompt)] = prompt
        prompt_lens_np[row] = len(prompt)
        max_new_tokens_np[row] = min(params.max_tokens, shape.max_new_tokens)
        stop_ids = _stop_ids(row, request, shape.max_stop_ids)
        stop_token_ids_np[row, : len(stop_ids)] = stop_ids
        sampling_rows_np[row] = _sampling_row(row, request, vocab_size=vocab_size, seed=seed)
        if sampling_rows_np[row, PROCESSORS] != 0 or params.min_tokens > 0:
            if packed_rows_np is None:
                num_words = num_row_words(shape.max_tokens_per_row, vocab_size)
                packed_rows_np = np.zeros((shape.batch_size, num_words), np.int32)
            packed_rows_np[row] = _packed_row(row, request, shape, vocab_size)
    return GenerateInputs(
        prompt_token_ids=prompt_token_ids_np,
        prompt_lens=prompt_lens_np,
        max_new_tokens=max_new_tokens_np,
        stop_token_ids=stop_token_ids_np,
        sampling_rows=sampling_rows_np,
        packed_rows=packed_rows_np,
    )


def _stop_ids(row: int, request: EngineRequest, max_stop_ids: int) -> list[int]:
    params = request.sampling_params
    eos_token_ids = () if params.ignore_eos else request.eos_token_ids
    stop_ids = list(dict.fromkeys([*eos_token_ids, *(params.stop_token_ids or ())]))
    if len(stop_ids) > max_stop_ids:
        raise InvalidRequestError(
            f"row {row} has {len(stop_ids)} stop tokens, wanted at most {max_stop_ids=}; "
            "make the shape with more.",
            param="stop_token_ids",
        )
    return stop_ids


def _sampling_row(
    row: int, request: EngineRequest, *, vocab_size: int, seed: int
) -> np.ndarray:  # i32[NUM_COLUMNS]
    params = request.sampling_params
    return encode_sampling_params(
        params,
        seed=seed_of_request(seed, str(row)) if params.seed is None else params.seed,
        vocab_size=vocab_size,
        num_prompt_tokens=len(request.prompt_token_ids),
        processors=processors_of(params, request.bad_words_token_ids, needs_grammar=False),
    )


def _packed_row(
    row: int, request: EngineRequest, shape: GenerateShape, vocab_size: int
) -> np.ndarray:  # i32[num_row_words]
    params = request.sampling_params
    return pack_row(
        row,
        np.array(request.prompt_token_ids, np.int32),
        params,
        bad_words_token_ids=request.bad_words_token_ids,
        # The model's EOS also where it ends nothing, as in the engine.
        early_end_ids=(*request.eos_token_ids, *(params.stop_token_ids or ())),
        max_model_len=shape.max_tokens_per_row,
        vocab_size=vocab_size,
    )
