"""Compiled generation: one JAX function processes prompts and runs the whole decode loop.

`make_generate` returns a pure function of arrays, for use inside other JAX programs.
`CompiledGenerator` calls it with lists of token ids. Neither needs an engine or a server. Greedy
tokens are the engine's, and so are tokens drawn with a `seed`. Without a seed, the engine derives
one from the request id; `CompiledGenerator` derives one from the index of the prompt.

`CompiledGenerator` applies the fields of `SamplingParams` that change tokens. It rejects fields
that need the host between tokens or return more than tokens. Fields that concern only text or the
prefix cache have no effect.
"""

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from models import KernelSettings, LoadedModel
from paxkv.client.input_processor import InputProcessor
from paxkv.config.sampling_params import SamplingParams
from paxkv.config.setting import at_least
from paxkv.config.speculative_config import SpeculativeConfig
from paxkv.contracts.owner_process import OwnerProcess
from paxkv.contracts.scheduler_output import NewRequestData
from paxkv.errors import (
    InvalidRequestError,
    PromptTooLongError,
    UnsupportedFeatureError,
)
from paxkv.runner.batch.input_batch import InputBatch
from paxkv.runner.memory.device_mesh import mesh_of
from paxkv.runner.memory.max_model_len import find_max_model_len
from paxkv.runner.programs.generation import GenerateInputs, GenerateShape, make_generate
from paxkv.runner.programs.generation_drafts import ModelDrafts, load_drafts
from paxkv.scheduler.request import Request
from paxkv.text.tokenizer import Tokenizer

# Settings that need the host between tokens or return more than tokens -> what to do instead.
_ENGINE_SETTINGS = {
    "n": "pass the prompt several times",
    "stop_strings": "use stop_token_ids",
    "logprobs": "leave it out",
    "prompt_logprobs": "leave it out",
    "structured_outputs": "leave it out",
}
_DEFAULTS = SamplingParams()


class CompiledGenerator:
    """Generates tokens for lists of token ids with one compiled function.

    Args:
        model: From `models.load_model`.
        shape: All static sizes. The first call of `generate` compiles. The first call with
            `min_tokens`, penalties, biases, allowed tokens or bad words compiles a second program.
        seed: For prompts whose `SamplingParams` have no seed.
        max_model_len: Largest number of tokens of prompt and output together. None is the model's
            limit, as far as its rotary embedding is scaled.
        tokenizer: The model's tokenizer, which `bad_words` need. Its EOS token ends rows, as in the
            engine.
        speculative_config: Verify drafts of the method "ngram" or "draft_model", as `LLM` does.
            This changes no token. A draft model is loaded in the dtype of `model`.

    Raises:
        ConfigError: `max_model_len` is below 2, or larger than the model's limit;
            `speculative_config` has another method.
        ModelError: The draft model cannot be loaded, or has another vocabulary.
    """

    def __init__(
        self,
        model: LoadedModel,
        shape: GenerateShape,
        *,
        seed: int = 0,
        max_model_len: int | None = None,
        tokenizer: Tokenizer | None = None,
        speculative_config: SpeculativeConfig | Mapping[str, object] | None = None,
    ) -> None:
        at_least("max_model_len", max_model_len, 2)
        self._owner = OwnerProcess("this CompiledGenerator")
        if tokenizer is not None:
            model = model.without_tokens(tokenizer.ids_without_token(model.config.vocab_size))
        mesh = mesh_of(model.params[0])
        if mesh.size > 1:
            model = model.with_kernels(KernelSettings.for_mesh(mesh))
        self._model = model
        self._shape = shape
        self._seed = seed
        self._max_model_len = find_max_model_len(max_model_len, model.config)
        self._tokenizer = tokenizer
        # The same options as for the engine's programs.
        options = model.platform.compiler_options(model.product_dtypes)
        if speculative_config is not None and not isinstance(speculative_config, SpeculativeConfig):
            speculative_config = SpeculativeConfig.from_fields(speculative_config)
        drafts = load_drafts(speculative_config, model, max_model_len=max_model_len)
        self._draft_params = drafts.model.params if isinstance(drafts, ModelDrafts) else ()
        generate = make_generate(model, shape, drafts=drafts)
        self._generate = jax.jit(generate, compiler_options=options)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams],
        *,
        eos_token_ids: Sequence[int] = (),
    ) -> list[list[int]]:
        """Returns the new token ids of each prompt.

        Args:
            sampling_params: With `max_tokens=None`, a row ends at the limit of `shape` or of the
                model.
            eos_token_ids: Tokens that end a row, in addition to the tokenizer's EOS token. The
                engine uses `model.config.eos_token_ids`.

        Raises:
            InvalidRequestError: A prompt or setting does not fit the shape or the model.
            UnsupportedFeatureError: A setting needs the engine.
            ForkedProcessError: This process is a fork of the one that created the generator.
        """
        self._owner.check()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts) or len(prompts) > self._shape.batch_size:
            raise InvalidRequestError(
                f"got {len(prompts)} prompts and {len(sampling_params)} SamplingParams; pass one "
                "SamplingParams for all prompts or one for each, and at most "
                f"batch_size={self._shape.batch_size} prompts."
            )
        inputs_np = self._make_inputs(self._process(prompts, sampling_params, eos_token_ids))
        inputs = jax.device_put(inputs_np)
        outputs = jax.device_get(self._generate(self._model.params, inputs, self._draft_params))
        return [
            outputs.token_ids[row, : outputs.num_tokens[row]].tolist()
            for row in range(len(prompts))
        ]

    def _process(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: Sequence[SamplingParams],
        eos_token_ids: Sequence[int],
    ) -> list[Request]:
        """Checks the arguments and returns the requests that an engine would run."""
        eos_ids = _as_token_ids("eos_token_ids", eos_token_ids)
        if not all(type(i) is int and i >= 0 for i in eos_ids):
            raise InvalidRequestError(
                f"eos_token_ids must be integers of at least 0, got {eos_token_ids!r}."
            )
        processor = InputProcessor(
            tokenizer=self._tokenizer,
            vocab_size=self._model.config.vocab_size,
            max_model_len=self._max_model_len,
            max_fitting_tokens=self._max_model_len,
            eos_token_ids=eos_ids,
            default_max_tokens=self._shape.max_new_tokens,
        )
        requests = []
        for row, (prompt, params) in enumerate(zip(prompts, sampling_params, strict=True)):
            _check_needs_no_engine(params)
            token_ids = _as_token_ids("a prompt", prompt)
            engine_request = processor.process(token_ids, params, request_id=str(row))
            requests.append(Request(engine_request, max_num_tokens=self._max_model_len))
            self._check_fits(requests[-1])
        return requests

    def _check_fits(self, request: Request) -> None:
        params = request.sampling_params
        for param, needed, limit in (
            ("prompt", request.num_prompt_tokens, "max_prompt_len"),
            ("max_tokens", params.max_tokens, "max_new_tokens"),
            ("stop_token_ids", len(request.ending_token_ids), "max_stop_ids"),
        ):
            allowed = getattr(self._shape, limit)
            if needed > allowed:
                error_class = PromptTooLongError if param == "prompt" else InvalidRequestError
                raise error_class(
                    f"{param} of row {request.request_id} needs {limit}={needed}; the shape has "
                    f"{limit}={allowed}. Use a GenerateShape with a larger {limit}.",
                    param=param,
                )
        if request.scarce_token_ids:
            raise UnsupportedFeatureError(
                "allowed_token_ids, bad_words and min_tokens may leave no next token, and only an "
                "engine can end a row then. Use LLM, or allow more tokens.",
                param="bad_words",
            )

    def _make_inputs(self, requests: Sequence[Request]) -> GenerateInputs:
        """The requests as NumPy arrays. Rows after the last request have no prompt."""
        shape, vocab_size = self._shape, self._model.config.vocab_size
        batch = InputBatch.create(
            max_num_seqs=shape.batch_size,
            max_model_len=shape.max_tokens_per_row,
            tables=(),
            num_blocks=0,
            vocab_size=vocab_size,
            seed=self._seed,
        )
        max_new_tokens_np = np.ones(shape.batch_size, np.int32)
        stop_token_ids_np = np.full((shape.batch_size, shape.max_stop_ids), vocab_size, np.int32)
        for row, request in enumerate(requests):
            batch.add_new(
                NewRequestData(
                    req_id=request.request_id,
                    prompt_token_ids=request.prompt_token_ids,
                    sampling_params=request.sampling_params,
                    block_ids=(),
                    num_computed_tokens=0,
                    early_end_ids=request.early_end_ids,
                    bad_words_token_ids=request.bad_words_token_ids,
                )
            )
            max_new_tokens_np[row] = request.sampling_params.max_tokens
            stop_ids = sorted(request.ending_token_ids)
            stop_token_ids_np[row, : len(stop_ids)] = stop_ids
        packed_rows_np = None
        if started := batch.pack_started_rows():
            packed_rows_np = np.zeros((shape.batch_size, len(started[0])), np.int32)
            packed_rows_np[[row_np[0] for row_np in started]] = started
        return GenerateInputs(
            prompt_token_ids=batch.token_ids_np[:, : shape.max_prompt_len],
            prompt_lens=batch.num_tokens_np,
            max_new_tokens=max_new_tokens_np,
            stop_token_ids=stop_token_ids_np,
            sampling_rows=batch.sampling_rows_np,
            packed_rows=packed_rows_np,
        )


def _check_needs_no_engine(params: SamplingParams) -> None:
    for name, remedy in _ENGINE_SETTINGS.items():
        default = getattr(_DEFAULTS, name)
        # `InputProcessor` rejects objects that are not SamplingParams.
        value = getattr(params, name, default)
        if value != default:
            param = name.removesuffix("_strings")
            raise UnsupportedFeatureError(
                f"CompiledGenerator does not support {param}={value!r}: it returns only token ids, "
                "one row per prompt, and the host sees no token before the last one. Use LLM, or "
                f"{remedy}.",
                param=param,
            )


def _as_token_ids(name: str, value: object) -> list[int]:
    """A list or an array as a list. Converts NumPy's integers and does not check the values."""
    if isinstance(value, (np.ndarray, jax.Array)) and value.ndim == 1:
        return value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [int(i) if isinstance(i, np.integer) else i for i in value]
    got = f"an array of shape {value.shape}" if hasattr(value, "shape") else type(value).__name__
    raise InvalidRequestError(f"{name} must be a list of token ids, got {got}.")
