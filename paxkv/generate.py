"""The jit-compiled generation API: prompt processing and the whole decode loop as one function.

`make_generate` gives a pure function of arrays over a paged KV cache, for use inside other JAX
programs; `CompiledGenerator` wraps it with lists of token ids. Neither needs an engine, a server or
a step on the host, and their tokens are the engine's: greedily, and for prompts that bring a seed.
Without one the engine derives a seed from the request's id, and this from the prompt's place.

Every field of `SamplingParams` that tokens depend on holds here too, or is refused: `n` above 1,
`stop`, `logprobs`, `prompt_logprobs` and `structured_outputs` need the host between tokens, or are
more than tokens, and so do bans that may leave no token to draw. Those about text and the prefix
cache, neither of which is here, change nothing.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from models import ForwardBatch, LoadedModel, Wants
from paxkv.client.input_processor import InputProcessor
from paxkv.config.sampling_params import SamplingParams
from paxkv.config.setting import at_least
from paxkv.contracts.engine_request import EngineRequest
from paxkv.contracts.owner_process import OwnerProcess
from paxkv.errors import (
    ConfigError,
    InvalidRequestError,
    PromptTooLongError,
    UnsupportedFeatureError,
)
from paxkv.runner.batch.generate_inputs import GenerateInputs, GenerateShape, make_generate_inputs
from paxkv.runner.memory.kv_cache_arrays import empty_kv_cache, kv_cache_dtype
from paxkv.runner.memory.kv_cache_groups import groups_of_spec
from paxkv.runner.memory.max_model_len import find_max_model_len
from paxkv.runner.programs.decode_loop import (
    DecodeRows,
    DecodeState,
    first_decode_state,
    run_decode_loop,
)
from paxkv.runner.programs.make_batch import make_batch
from paxkv.runner.programs.step import Params
from paxkv.runner.sampling.row_state import RowState, num_row_words, unpack_rows, vocab_words
from paxkv.runner.sampling.sampled_tokens import NO_TOKEN
from paxkv.runner.sampling.sampler import sample
from paxkv.runner.sampling.sampler_program import SamplerFunction, make_sampler
from paxkv.runner.sampling.sampling_columns import SamplingInputs, join_step_rows
from paxkv.runner.shapes.program_shapes import SamplerShape, TableShape
from paxkv.runner.shapes.sampling_row import ROW
from paxkv.text.tokenizer import Tokenizer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOutputs:
    """What was generated; a stop token is included, as the engine includes it."""

    token_ids: jax.Array  # i32[batch_size, max_new_tokens], 0 past a row's end
    num_tokens: jax.Array  # i32[batch_size], in [0, max_new_tokens]


def make_generate(
    model: LoadedModel, shape: GenerateShape
) -> Callable[[Params, GenerateInputs], GenerateOutputs]:
    """The pure function `(params, inputs) -> outputs`; put it under `jax.jit` or inside a program.

    It holds its own KV cache, which lives only while it runs. Sliding layers keep all their blocks
    in it, also those that no token sees any more.
    """
    kv_dtype = kv_cache_dtype(model.dtype, model.platform)
    spec = model.config.spec(kv_dtype)
    groups = groups_of_spec(
        spec, block_size=shape.block_size, head_dim_step=model.platform.head_dim_step
    )
    model = model.with_places(groups.places(spec))
    # The last token is drawn and returned, but its key and value are never needed.
    table_shapes = groups.tables(shape.max_tokens_per_row - 1)
    block_tables, num_blocks = _number_blocks(table_shapes, shape.batch_size)
    draw_processed = make_sampler(
        SamplerShape(
            num_rows=shape.batch_size,
            num_reqs=shape.batch_size,
            max_model_len=shape.max_tokens_per_row,
            chunk_rows=shape.batch_size,
        )
    )

    def generate(params: Params, inputs: GenerateInputs) -> GenerateOutputs:
        draw = functools.partial(_draw_tokens, model, draw_processed, inputs)
        rows = DecodeRows(
            # Each draws the first of its tokens after its prompt.
            num_tokens=inputs.max_new_tokens - 1,
            ending_ids=inputs.stop_token_ids,
            first_end=jnp.zeros(shape.batch_size, jnp.int32),
            num_used=shape.batch_size,
            block_tables=tuple(map(jnp.asarray, block_tables)),
            table_shapes=table_shapes,
        )
        has_prompt = inputs.prompt_lens > 0
        state = first_decode_state(
            token_ids=jnp.zeros(shape.batch_size, jnp.int32),
            positions=jnp.maximum(inputs.prompt_lens - 1, 0),
            is_alive=has_prompt,
            pages=empty_kv_cache(groups.config(num_blocks), model.platform, kv_dtype),
            drawing=_first_row_state(inputs, shape, model.config.vocab_size),
            max_steps=shape.max_new_tokens - 1,
            result_width=1,
        )
        batch = _prompt_batch(inputs, shape, rows)
        outputs, pages = model.forward(params, state.pages, batch)
        first, drawing = draw(params, batch, outputs.for_logits, state)
        is_stop = jnp.any(first == inputs.stop_token_ids, axis=1)
        state = dataclasses.replace(
            state,
            token_ids=first[:, 0],
            positions=inputs.prompt_lens,
            is_alive=has_prompt & ~is_stop & (rows.num_tokens > 0),
            pages=pages,
            drawing=drawing,
        )
        results = jnp.where(has_prompt[:, None], first, NO_TOKEN)[None]
        if shape.max_new_tokens > 1:
            num_steps = shape.max_new_tokens - 1
            state = run_decode_loop(model, params, rows, state, draw, num_steps=num_steps)
            results = jnp.concatenate([results, state.results])
        token_ids = results[:, :, 0].T
        is_drawn = token_ids != NO_TOKEN
        return GenerateOutputs(
            token_ids=jnp.where(is_drawn, token_ids, 0),
            num_tokens=is_drawn.sum(axis=1, dtype=jnp.int32),
        )

    return generate


def _first_row_state(
    inputs: GenerateInputs, shape: GenerateShape, vocab_size: int
) -> RowState | None:
    if inputs.packed_rows is None:
        return None
    wanted = (shape.batch_size, num_row_words(shape.max_tokens_per_row, vocab_size))
    if inputs.packed_rows.shape != wanted:
        raise ConfigError(
            f"packed_rows has the shape {inputs.packed_rows.shape}, wanted {wanted}: pack each row "
            f"with max_model_len={shape.max_tokens_per_row} and {vocab_size=}."
        )
    return unpack_rows(
        inputs.packed_rows, max_model_len=shape.max_tokens_per_row, vocab_size=vocab_size
    )


def _draw_tokens(
    model: LoadedModel,
    draw_processed: SamplerFunction,
    inputs: GenerateInputs,
    params: Params,
    batch: ForwardBatch,
    hidden: jax.Array,  # f[batch_size, hidden]
    state: DecodeState,
) -> tuple[jax.Array, RowState | None]:  # i32[batch_size, 1]
    """A token for every row, and the state with those of rows that are alive."""
    logits = model.compute_logits(params, hidden)
    draw_position = state.positions + 1
    if state.drawing is None:
        sampling = SamplingInputs(rows=inputs.sampling_rows, draw_position=draw_position)
        return sample(logits, sampling).token_ids[:, None], None
    # For speed alone: at place 0, rows that have ended are not processed any more.
    draw_position = jnp.where(state.is_alive, draw_position, 0)
    rows = inputs.sampling_rows.at[:, ROW].set(np.arange(logits.shape[0], dtype=np.int32))
    fields = {"sampling_rows": rows, "draw_position": draw_position}
    sampling_rows = join_step_rows(fields, num_rows=logits.shape[0])
    no_mask = jnp.zeros((logits.shape[0], 1 + vocab_words(logits.shape[1])), jnp.int32)
    _, row_state, _, drawn = draw_processed(logits, state.drawing, sampling_rows, no_mask)
    return drawn[:, None], row_state


class CompiledGenerator:
    """Generates for lists of token ids with one compiled function.

    Args:
        model: What `models.load_model` gave.
        shape: The static sizes. The first `generate` compiles, later ones do not; but the first one
            with `min_tokens`, penalties, biases, allowed tokens or bad words compiles once more.
        seed: Of prompts whose `SamplingParams` bring none.
        max_model_len: Most tokens of prompt and output together: None is the model's limit, as far
            as its rotary embedding is scaled.
        tokenizer: Of the model; `bad_words` need it. Its EOS token ends rows, as the engine's does.

    Raises:
        ConfigError: `max_model_len` is below 2, or over the model's positions.
    """

    def __init__(
        self,
        model: LoadedModel,
        shape: GenerateShape,
        *,
        seed: int = 0,
        max_model_len: int | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        at_least("max_model_len", max_model_len, 2)
        self._owner = OwnerProcess("this CompiledGenerator")
        if tokenizer is not None:
            model = model.without_tokens(tokenizer.ids_without_token(model.config.vocab_size))
        self._model = model
        self._shape = shape
        self._seed = seed
        self._max_model_len = find_max_model_len(max_model_len, model.config)
        self._tokenizer = tokenizer
        # As the engine's programs are compiled.
        options = model.platform.compiler_options({param.dtype.name for param in model.params})
        self._generate = jax.jit(make_generate(model, shape), compiler_options=options)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams],
        *,
        eos_token_ids: Sequence[int] = (),
    ) -> list[list[int]]:
        """New token ids of each prompt, in order.

        Args:
            sampling_params: `max_tokens=None` is as many as `shape` has room for.
            eos_token_ids: Besides the tokenizer's; the engine takes `model.config.eos_token_ids`.

        Raises:
            InvalidRequestError: A prompt or setting does not fit the shape or the model.
            UnsupportedFeatureError: A setting needs the engine.
            ForkedProcessError: This process is a fork of the one that created the generator.
        """
        self._owner.check()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise InvalidRequestError(
                f"got {len(prompts)} prompts and {len(sampling_params)} SamplingParams; "
                "wanted one of each, or one SamplingParams for all."
            )
        if len(prompts) > self._shape.batch_size:
            raise InvalidRequestError(
                f"got {len(prompts)} prompts, wanted at most batch_size={self._shape.batch_size}."
            )
        requests = self._process(prompts, sampling_params, eos_token_ids)
        inputs_np = make_generate_inputs(
            requests, self._shape, vocab_size=self._model.config.vocab_size, seed=self._seed
        )
        outputs = jax.device_get(self._generate(self._model.params, jax.device_put(inputs_np)))
        return [
            outputs.token_ids[row, : outputs.num_tokens[row]].tolist()
            for row in range(len(prompts))
        ]

    def _process(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: Sequence[SamplingParams],
        eos_token_ids: Sequence[int],
    ) -> list[EngineRequest]:
        """What the engine would get for each prompt, through its own door."""
        eos_ids = _as_list(eos_token_ids)
        if eos_ids is None or not all(type(i) is int and i >= 0 for i in eos_ids):
            raise InvalidRequestError(
                "eos_token_ids must be a list of token ids, integers of at least 0, got "
                f"{eos_token_ids!r}."
            )
        processor = InputProcessor(
            tokenizer=self._tokenizer,
            vocab_size=self._model.config.vocab_size,
            max_model_len=self._max_model_len,
            max_fitting_tokens=self._max_model_len,
            eos_token_ids=eos_ids,
        )
        requests = []
        for row, (prompt, params) in enumerate(zip(prompts, sampling_params, strict=True)):
            self._check_params(params)
            request = processor.process(self._checked(prompt), params, request_id=str(row))
            if request.scarce_token_ids:
                raise UnsupportedFeatureError(
                    "allowed_token_ids, bad_words and min_tokens may leave no next token, where "
                    "only an engine can end the row. For this use LLM, or loosen them.",
                    param="bad_words",
                )
            requests.append(request)
        return requests

    def _checked(self, prompt: Sequence[int]) -> list[int]:
        """A prompt as the engine's door takes it, which looks at the tokens themselves."""
        token_ids = _as_list(prompt)
        if token_ids is None:
            got = type(prompt).__name__
            if isinstance(prompt, (np.ndarray, jax.Array)):
                got = f"an array of shape {prompt.shape}"
            raise InvalidRequestError(f"a prompt must be a list of token ids, got {got}.")
        if len(token_ids) > self._shape.max_prompt_len:
            raise PromptTooLongError(
                f"prompt has {len(token_ids)} tokens, wanted at most max_prompt_len="
                f"{self._shape.max_prompt_len}; make the shape with more."
            )
        return token_ids

    def _check_params(self, params: SamplingParams) -> None:
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                f"sampling_params must be SamplingParams, got {type(params).__name__}."
            )
        max_new_tokens = self._shape.max_new_tokens
        for name in ("max_tokens", "min_tokens"):
            if (getattr(params, name) or 0) > max_new_tokens:
                raise InvalidRequestError(
                    f"{name}={getattr(params, name)} is over the shape's {max_new_tokens=}; make "
                    "the shape with more.",
                    param=name,
                )
        for name, (is_asked, remedy) in {
            "n": (params.n > 1, "pass the prompt as several rows"),
            "stop": (params.stop_strings, "use stop_token_ids"),
            "logprobs": (params.logprobs is not None, "leave it out"),
            "prompt_logprobs": (params.prompt_logprobs is not None, "leave it out"),
            "structured_outputs": (params.structured_outputs is not None, "leave it out"),
        }.items():
            if is_asked:
                raise UnsupportedFeatureError(
                    f"got {name}={getattr(params, name)!r}; CompiledGenerator returns token ids "
                    "alone, one row of each prompt, and never goes back to the host in between. "
                    f"For this use LLM, or {remedy}.",
                    param=name,
                )


def _as_list(token_ids: object) -> list[int] | None:
    """Token ids of a list or an array, as Python's integers; None of what is neither."""
    if isinstance(token_ids, (np.ndarray, jax.Array)):
        return token_ids.tolist() if token_ids.ndim == 1 else None
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, (str, bytes)):
        return None
    return [int(i) if isinstance(i, np.integer) else i for i in token_ids]


def _number_blocks(
    table_shapes: Sequence[TableShape], batch_size: int
) -> tuple[list[np.ndarray], int]:
    """Block tables i32[num_groups, batch_size, max_blocks_per_req], and the blocks of the pool.

    Row r of the first group holds the blocks from 1 + r * max_blocks_per_req on, in order, for the
    whole run; those of the next group follow. Block 0 is the null block.
    """
    tables = []
    start = 1
    for table in table_shapes:
        dims = (table.num_groups, batch_size, table.max_blocks_per_req)
        end = start + math.prod(dims)
        tables.append(np.arange(start, end, dtype=np.int32).reshape(dims))
        start = end
    return tables, start


def _prompt_batch(inputs: GenerateInputs, shape: GenerateShape, rows: DecodeRows) -> ForwardBatch:
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
    return make_batch(
        token_ids=jnp.where(is_token, inputs.prompt_token_ids[row, positions], 0),
        positions=positions,
        query_start_loc=query_start_loc,
        seq_lens=inputs.prompt_lens,
        block_tables=rows.block_tables,
        table_shapes=rows.table_shapes,
        logits_indices=jnp.maximum(query_start_loc[1:] - 1, 0),
        wants=Wants(),
    )
