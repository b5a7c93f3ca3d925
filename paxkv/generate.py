"""The jit-compiled generation API: prompt processing and the whole decode loop as one function.

`make_generate` gives a pure function of arrays over a paged KV cache, for use inside other JAX
programs; `CompiledGenerator` wraps it with lists of token ids. Neither needs an engine, a server or
a step on the host, and their tokens are the engine's: greedily, and for prompts that bring a seed.
Without one the engine derives a seed from the request's id, and this from the prompt's place.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from models import ForwardBatch, KVCache, LoadedModel, kv_cache_layers, place_layers
from paxkv.errors import ConfigError, InvalidRequestError, PromptTooLongError
from paxkv.runner.kv_cache_arrays import kv_cache_dtype
from paxkv.runner.sampler import sample
from paxkv.runner.sampling_columns import (
    NUM_COLUMNS,
    SamplingInputs,
    encode_sampling_params,
    seed_of_request,
)
from paxkv.runner.step import Params, forward
from paxkv.sampling_params import SamplingParams


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
    def max_blocks_per_req(self) -> int:
        # The last token is drawn and returned, but its key and value are never needed.
        return -(-(self.max_prompt_len + self.max_new_tokens - 1) // self.block_size)

    def num_blocks(self, num_groups: int) -> int:
        """Blocks of the cache; each row has its own in every group of layers, and 0 is null."""
        return 1 + num_groups * self.batch_size * self.max_blocks_per_req


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateInputs:
    """The arrays that a compiled generation takes; a row with prompt length 0 generates nothing."""

    prompt_token_ids: jax.Array  # i32[batch_size, max_prompt_len], anything past the prompt's end
    prompt_lens: jax.Array  # i32[batch_size], in [0, max_prompt_len]
    max_new_tokens: jax.Array  # i32[batch_size], in [1, max_new_tokens]
    stop_token_ids: jax.Array  # i32[batch_size, max_stop_ids], vocab size where there is none
    sampling_rows: jax.Array  # i32[batch_size, NUM_COLUMNS], by `encode_sampling_params`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOutputs:
    """What was generated; a stop token is included, as the engine includes it."""

    token_ids: jax.Array  # i32[batch_size, max_new_tokens], 0 past a row's end
    num_tokens: jax.Array  # i32[batch_size], in [0, max_new_tokens]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _LoopState:
    kv_cache: KVCache
    last_token_ids: jax.Array  # i32[batch_size]
    num_tokens: jax.Array  # i32[batch_size], generated so far
    is_done: jax.Array  # bool[batch_size]
    token_ids: jax.Array  # i32[batch_size, max_new_tokens]


def make_generate(
    model: LoadedModel, shape: GenerateShape
) -> Callable[[Params, GenerateInputs], GenerateOutputs]:
    """The pure function `(params, inputs) -> outputs`; put it under `jax.jit` or inside a program.

    It holds its own KV cache, which lives only while it runs. Sliding layers keep all their blocks
    in it, also those that no token sees any more.
    """
    placements = place_layers(kv_cache_layers(model.config)).values()
    num_groups = 1 + max(placement.group_idx for placement in placements)
    num_cache_rows = 1 + max(placement.row for placement in placements)
    row_ids = np.arange(shape.batch_size, dtype=np.int32)
    # Row r of group 0 holds the blocks from 1 + r * max_blocks_per_req on, in order, for the whole
    # run; those of group 1 follow.
    block_ids = np.arange(1, shape.num_blocks(num_groups), dtype=np.int32)
    block_tables = block_ids.reshape(num_groups, shape.batch_size, shape.max_blocks_per_req)

    def draw(
        params: Params, state: _LoopState, batch: ForwardBatch, inputs: GenerateInputs
    ) -> _LoopState:
        """One forward pass and one drawn token for every row that is not done."""
        logits, kv_cache = forward(model, params, state.kv_cache, batch)
        draw_position = inputs.prompt_lens + state.num_tokens
        sampling = SamplingInputs(rows=inputs.sampling_rows, draw_position=draw_position)
        drawn = sample(logits, sampling).token_ids
        # Rows that are done write past the end, which drops the write.
        place = jnp.where(state.is_done, shape.max_new_tokens, state.num_tokens)
        num_tokens = state.num_tokens + ~state.is_done
        is_stop = jnp.any(drawn[:, None] == inputs.stop_token_ids, axis=1)
        return _LoopState(
            kv_cache=kv_cache,
            last_token_ids=jnp.where(state.is_done, state.last_token_ids, drawn),
            num_tokens=num_tokens,
            is_done=state.is_done | is_stop | (num_tokens >= inputs.max_new_tokens),
            token_ids=state.token_ids.at[row_ids, place].set(drawn, mode="drop"),
        )

    def decode_batch(state: _LoopState, inputs: GenerateInputs) -> ForwardBatch:
        # A row that is done computes its last token in every step, into the same slot.
        positions = jnp.maximum(inputs.prompt_lens + state.num_tokens - 1, 0)
        return ForwardBatch(
            token_ids=state.last_token_ids,
            positions=positions,
            query_start_loc=jnp.arange(shape.batch_size + 1, dtype=jnp.int32),
            seq_lens=jnp.broadcast_to(positions + 1, (num_groups, shape.batch_size)),
            block_tables=jnp.asarray(block_tables),
            logits_indices=jnp.asarray(row_ids),
            max_query_len=1,
        )

    def generate(params: Params, inputs: GenerateInputs) -> GenerateOutputs:
        state = _LoopState(
            kv_cache=_empty_kv_cache(model, num_cache_rows, shape.num_blocks(num_groups), shape),
            last_token_ids=jnp.zeros(shape.batch_size, jnp.int32),
            num_tokens=jnp.zeros(shape.batch_size, jnp.int32),
            is_done=inputs.prompt_lens == 0,
            token_ids=jnp.zeros((shape.batch_size, shape.max_new_tokens), jnp.int32),
        )
        state = draw(params, state, _prompt_batch(inputs, shape, block_tables), inputs)
        state = jax.lax.while_loop(
            lambda state: ~jnp.all(state.is_done),
            lambda state: draw(params, state, decode_batch(state, inputs), inputs),
            state,
        )
        return GenerateOutputs(token_ids=state.token_ids, num_tokens=state.num_tokens)

    return generate


class CompiledGenerator:
    """Generates for lists of token ids with one compiled function.

    Args:
        model: What `models.load_model` gave.
        shape: The static sizes; the first `generate` compiles, later ones do not.
        seed: Of prompts whose `SamplingParams` bring none.
    """

    def __init__(self, model: LoadedModel, shape: GenerateShape, *, seed: int = 0) -> None:
        self._model = model
        self._shape = shape
        self._seed = seed
        self._generate = jax.jit(make_generate(model, shape))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams],
        *,
        eos_token_ids: Sequence[int] = (),
    ) -> list[list[int]]:
        """New token ids of each prompt, in order; `stop` strings are not looked for.

        Raises:
            InvalidRequestError: A prompt or setting does not fit the shape or the model.
        """
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise InvalidRequestError(
                f"got {len(prompts)} prompts and {len(sampling_params)} SamplingParams; "
                "wanted one of each, or one SamplingParams for all."
            )
        inputs_np = self._make_inputs(prompts, sampling_params, eos_token_ids)
        outputs = jax.device_get(self._generate(self._model.params, jax.device_put(inputs_np)))
        return [
            outputs.token_ids[row, : outputs.num_tokens[row]].tolist()
            for row in range(len(prompts))
        ]

    def _make_inputs(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: Sequence[SamplingParams],
        eos_token_ids: Sequence[int],
    ) -> GenerateInputs:
        shape, vocab_size = self._shape, self._model.config.vocab_size
        if len(prompts) > shape.batch_size:
            raise InvalidRequestError(
                f"got {len(prompts)} prompts, wanted at most batch_size={shape.batch_size}."
            )
        prompt_token_ids_np = np.zeros((shape.batch_size, shape.max_prompt_len), np.int32)
        prompt_lens_np = np.zeros(shape.batch_size, np.int32)
        max_new_tokens_np = np.ones(shape.batch_size, np.int32)
        stop_token_ids_np = np.full((shape.batch_size, shape.max_stop_ids), vocab_size, np.int32)
        sampling_rows_np = np.zeros((shape.batch_size, NUM_COLUMNS), np.int32)
        for row, (prompt, params) in enumerate(zip(prompts, sampling_params, strict=True)):
            self._check_row(prompt, params)
            stop_ids = [
                *(() if params.ignore_eos else eos_token_ids),
                *(params.stop_token_ids or ()),
            ]
            if len(stop_ids) > shape.max_stop_ids:
                raise InvalidRequestError(
                    f"row {row} has {len(stop_ids)} stop tokens, wanted at most "
                    f"max_stop_ids={shape.max_stop_ids}; make the shape with more."
                )
            prompt_token_ids_np[row, : len(prompt)] = prompt
            prompt_lens_np[row] = len(prompt)
            # As in the engine, a row ends where the model's positions do.
            room = self._model.config.max_position_embeddings - len(prompt)
            max_new_tokens_np[row] = min(params.max_tokens or shape.max_new_tokens, room)
            stop_token_ids_np[row, : len(stop_ids)] = stop_ids
            seed = params.seed if params.seed is not None else seed_of_request(self._seed, str(row))
            sampling_rows_np[row] = encode_sampling_params(params, seed=seed, vocab_size=vocab_size)
        return GenerateInputs(
            prompt_token_ids=prompt_token_ids_np,
            prompt_lens=prompt_lens_np,
            max_new_tokens=max_new_tokens_np,
            stop_token_ids=stop_token_ids_np,
            sampling_rows=sampling_rows_np,
        )

    def _check_row(self, prompt: Sequence[int], params: SamplingParams) -> None:
        shape, config = self._shape, self._model.config
        if not prompt:
            raise InvalidRequestError("prompt has 0 tokens, wanted at least 1.")
        if len(prompt) > shape.max_prompt_len:
            raise PromptTooLongError(
                f"prompt has {len(prompt)} tokens, wanted at most max_prompt_len="
                f"{shape.max_prompt_len}; make the shape with more."
            )
        if len(prompt) >= config.max_position_embeddings:
            raise PromptTooLongError(
                f"prompt has {len(prompt)} tokens, wanted at most "
                f"{config.max_position_embeddings - 1}: the model has "
                f"{config.max_position_embeddings} positions, and one new token must fit."
            )
        if not all(0 <= token_id < config.vocab_size for token_id in prompt):
            raise InvalidRequestError(
                f"prompt token ids must be in [0, {config.vocab_size}), got {list(prompt)}."
            )
        if (params.max_tokens or 1) > shape.max_new_tokens:
            raise InvalidRequestError(
                f"max_tokens={params.max_tokens} is over the shape's max_new_tokens="
                f"{shape.max_new_tokens}; make the shape with more.",
                param="max_tokens",
            )
        if params.n > 1:
            raise InvalidRequestError(
                f"CompiledGenerator makes one completion of each row, got n={params.n}; pass the "
                "prompt as several rows, or use LLM.",
                param="n",
            )
        if params.stop_strings or params.logprobs is not None:
            raise InvalidRequestError(
                "CompiledGenerator returns token ids only; stop strings and logprobs need LLM."
            )


def _empty_kv_cache(
    model: LoadedModel, num_cache_rows: int, num_blocks: int, shape: GenerateShape
) -> KVCache:
    config = model.config
    cache_shape = (
        num_cache_rows,
        num_blocks,
        config.num_kv_heads,
        shape.block_size,
        config.head_dim,
    )
    weights = model.params[0]
    platform = next(iter(weights.devices())).platform
    zeros = jnp.zeros(cache_shape, kv_cache_dtype(weights.dtype.name, platform))
    return KVCache(k=zeros, v=zeros)


def _prompt_batch(
    inputs: GenerateInputs, shape: GenerateShape, block_tables: np.ndarray
) -> ForwardBatch:
    """All prompts as one ragged batch: rows packed one after another, padding behind them."""
    query_start_loc = jnp.concatenate(
        [jnp.zeros(1, jnp.int32), jnp.cumsum(inputs.prompt_lens, dtype=jnp.int32)]
    )
    token_idx = jnp.arange(shape.batch_size * shape.max_prompt_len, dtype=jnp.int32)
    # prompt_lens [2, 0, 3] -> query_start_loc [0, 2, 2, 5] -> row of each token [0, 0, 2, 2, 2].
    row = jnp.searchsorted(query_start_loc, token_idx, side="right").astype(jnp.int32) - 1
    row = jnp.minimum(row, shape.batch_size - 1)
    is_token = token_idx < query_start_loc[-1]
    positions = jnp.where(is_token, token_idx - query_start_loc[row], 0)
    return ForwardBatch(
        token_ids=jnp.where(is_token, inputs.prompt_token_ids[row, positions], 0),
        positions=positions,
        query_start_loc=query_start_loc,
        seq_lens=jnp.broadcast_to(inputs.prompt_lens, (block_tables.shape[0], shape.batch_size)),
        block_tables=jnp.asarray(block_tables),
        logits_indices=jnp.maximum(query_start_loc[1:] - 1, 0),
    )
