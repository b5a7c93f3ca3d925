"""`LLM`: runs the server's engine from Python."""

import contextlib
import dataclasses
import functools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from tqdm import tqdm

from paxkv.client.beam_search import BeamSearch, prompt_params
from paxkv.client.input_processor import Prompt, text_of_prompt
from paxkv.config.cache_config import CacheConfig
from paxkv.config.engine_config import EngineConfig
from paxkv.config.generation_config import FROM_MODEL
from paxkv.config.model_config import (
    AUTO_MODEL_IMPL,
    ChatTemplateContentFormat,
    Dtype,
    LoadFormat,
    ModelConfig,
    ProductDtype,
    Quantization,
)
from paxkv.config.parallel_config import ParallelConfig
from paxkv.config.runner_config import RunnerConfig
from paxkv.config.sampling_defaults import GenerationConfig
from paxkv.config.sampling_params import BeamSearchParams, SamplingParams
from paxkv.config.scheduler_config import SchedulerConfig, SchedulerPolicy
from paxkv.config.setting import unspelled
from paxkv.config.speculative_config import SpeculativeConfig
from paxkv.config.structured_outputs_params import StructuredOutputsParams
from paxkv.contracts.engine_output import SchedulerStats
from paxkv.contracts.engine_request import EngineRequest
from paxkv.contracts.engine_start import ModelInfo
from paxkv.contracts.observation import PrefixCacheMiss
from paxkv.contracts.owner_process import OwnerProcess
from paxkv.contracts.request_output import BeamSearchOutput, RequestOutput
from paxkv.contracts.wire import EngineTransport
from paxkv.entrypoints.build import build_engine, build_llm_client
from paxkv.entrypoints.llm_arguments import drop_vllm_arguments, json_text
from paxkv.errors import EngineDeadError, InvalidRequestError, InvariantError
from paxkv.text.chat_template import ChatTemplate, Message
from paxkv.text.leading_messages import count_leading_chars
from paxkv.text.tokenizer import Tokenizer

Conversation = Sequence[Message]


class LLM:
    """A model that is loaded to generate text from Python.

    The requests of one call are batched together. Calls from several threads run one after another.
    Use the object as a context manager, or call `close`, to free the device's memory early. In a
    fork of the process that created it, every call raises ForkedProcessError.

    Args:
        model: Folder of a Hugging Face checkpoint, name on the hub, or GGUF file; None is the
            built-in demo.
        dtype: "auto" is float32 on the CPU, and the checkpoint's dtype on other devices.
        seed: Seed of random weights, and of requests without a seed.
        revision: Branch, tag or commit of a model on the hub.
        tokenizer: Folder or hub name of another tokenizer.
        tokenizer_revision: Branch, tag or commit of `tokenizer`.
        hf_token: Access token of the hub. None and True are `HF_TOKEN`, or the token of `hf auth
            login`.
        served_model_name: Name in `model_info`.
        max_model_len: Maximum of prompt and output tokens together. None is the model's limit; see
            `ModelConfig.max_model_len`. "auto" or -1 lowers this limit to what fits in memory.
        load_format: See `ModelConfig`.
        model_impl: See `ModelConfig`; for example "my_model:MyModel".
        product_dtype: See `ModelConfig`.
        quantization: See `ModelConfig`.
        quantization_group_size: See `ModelConfig`.
        chat_template: See `ModelConfig`.
        chat_template_content_format: See `ModelConfig`.
        generation_config: Source of `get_default_sampling_params`: "auto" is the model's
            generation_config.json, "vllm" is none, and a folder is the file in that folder.
        override_generation_config: Overrides values of `generation_config`: `{"temperature": 0.5}`.
        scheduling_policy: `SchedulerConfig.policy`, under vLLM's name.
        settings: Any field of `CacheConfig`, `SchedulerConfig`, `RunnerConfig` and
            `ParallelConfig`, as in `LLM(block_size=32, enable_prefix_caching=False)`. JSON objects
            are dictionaries, as in `LLM(speculative_config={"method": "ngram", ...})`. Arguments of
            vLLM's `LLM` are accepted too, if their value asks for something that paxkv always does.
            None selects the default of any argument.

    Raises:
        TypeError: An argument has an unknown name.
        ConfigError: The settings do not fit each other, the model or the device; or an argument
            asks for a feature of vLLM that paxkv does not have. With several engines, also if the
            model cannot be loaded.
        ModelError: The model cannot be loaded, or this process is a fork of a process that has
            loaded a model.
        EngineDeadError: One of several engines ended before it was ready.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        dtype: Dtype | None = "auto",
        seed: int | None = 0,
        revision: str | None = None,
        tokenizer: str | Path | None = None,
        tokenizer_revision: str | None = None,
        hf_token: str | bool | None = None,
        served_model_name: str | Sequence[str] | None = None,
        max_model_len: int | str | None = None,
        load_format: LoadFormat | None = "auto",
        model_impl: str | None = AUTO_MODEL_IMPL,
        product_dtype: ProductDtype | None = "auto",
        quantization: Quantization | None = "none",
        quantization_group_size: int | None = 128,
        chat_template: str | None = None,
        chat_template_content_format: ChatTemplateContentFormat | None = "auto",
        generation_config: str | Path | None = FROM_MODEL,
        override_generation_config: Mapping[str, object] | None = None,
        scheduling_policy: SchedulerPolicy | None = "fcfs",
        **settings: object,
    ) -> None:
        settings = drop_vllm_arguments(settings)
        model_config = _model_config(
            model=None if model is None else str(model),
            # str(torch.float16) is "torch.float16".
            dtype=(
                None
                if dtype is None
                else unspelled(ModelConfig, "dtype", str(dtype).removeprefix("torch."))
            ),
            seed=seed,
            revision=revision,
            tokenizer=None if tokenizer is None else str(tokenizer),
            tokenizer_revision=tokenizer_revision,
            hf_token=None if hf_token is True else hf_token,
            served_model_name=_as_names(served_model_name),
            max_model_len=unspelled(ModelConfig, "max_model_len", max_model_len),
            load_format=load_format,
            model_impl=model_impl,
            product_dtype=product_dtype,
            quantization=quantization,
            quantization_group_size=quantization_group_size,
            chat_template=chat_template,
            chat_template_content_format=chat_template_content_format,
            generation_config=(
                str(generation_config) if isinstance(generation_config, Path) else generation_config
            ),
            override_generation_config=GenerationConfig.from_fields(
                {} if override_generation_config is None else override_generation_config
            ),
        )
        config = _engine_config(model_config, {"policy": scheduling_policy} | settings)
        self._owner = OwnerProcess("this LLM")
        self._engine = build_engine(config, show_progress=sys.stderr.isatty())
        self._client = build_llm_client(self._engine)
        self._lock = threading.Lock()
        self._num_requests = 0
        # Also runs when the LLM is garbage-collected and when the interpreter exits, including in
        # forks, which must not end the engine of this process.
        self._finalizer = weakref.finalize(
            self, _close_in_owner, self._owner, self._engine.transport
        )

    @property
    def model_info(self) -> ModelInfo:
        return self._engine.model_info

    def get_tokenizer(self) -> Tokenizer | None:
        """Returns the model's tokenizer, or None if it has none."""
        return self._engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the parameters of calls without `sampling_params`.

        They are `SamplingParams()` with the values of the model's generation_config.json. Change
        them with `dataclasses.replace`. If you pass them to `generate`, it rejects a `max_tokens`
        that does not fit, unless you set `cuts_max_tokens`.
        """
        defaults = self.model_info.sampling_defaults.generation_config
        return SamplingParams(**defaults.sampling_keywords())

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        cuts_max_tokens: bool = False,
    ) -> list[RequestOutput]:
        """Completes prompts in batches; returns the outputs in the order of the prompts.

        With `SamplingParams(n=4)`, each prompt gets four completions and is computed once.

        Args:
            prompts: Text, a list of token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`;
                or a list of these.
            sampling_params: One for all prompts, or one for each. The default is
                `get_default_sampling_params`, with `cuts_max_tokens`.
            use_tqdm: Draw a progress bar on stderr.
            priority: One for all prompts, or one for each. Lower values run first. Has an effect
                only with the scheduling policy "priority".
            cuts_max_tokens: Lower the `max_tokens` of `sampling_params` to what the KV cache has
                room for. False rejects a prompt that needs more.

        Raises:
            InvalidRequestError: A prompt or its parameters are invalid.
            EngineDeadError: The engine has ended.
        """
        if type(cuts_max_tokens) is not bool:
            raise InvalidRequestError(
                f"cuts_max_tokens must be True or False, got {cuts_max_tokens!r}.",
                param="cuts_max_tokens",
            )
        prompts = _as_prompts(prompts)
        if sampling_params is None:
            sampling_params, cuts_max_tokens = self.get_default_sampling_params(), True
        sampling_params = _one_for_each("sampling_params", sampling_params, len(prompts))
        with self._turn():
            requests = self._process_inputs(
                prompts, sampling_params, priority, cuts_max_tokens=cuts_max_tokens
            )
            texts = [text_of_prompt(prompt) for prompt in prompts]
            with tqdm(
                total=len(prompts), desc="Processed prompts", unit="req", disable=not use_tqdm
            ) as progress:
                return self._run(requests, texts, progress)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[BeamSearchOutput]:
        """Finds the most likely continuations of each prompt; searches several prompts at once.

        Each step extends the `beam_width` best sequences by their most likely tokens. Sequences
        that reach EOS are set aside. The KV cache stores the common tokens of all sequences once.

        Args:
            prompts: See `generate`.
            concurrency_limit: Maximum of prompts searched at once, at least 1; None is all. With
                fewer prompts, the KV cache has more room for shared blocks, which must otherwise be
                computed again.
            priority: See `generate`.

        Returns:
            The sequences of each prompt, best first.

        Raises:
            InvalidRequestError: A prompt or an argument is invalid.
            EngineDeadError: The engine has ended.
        """
        prompts = _as_prompts(prompts)
        if concurrency_limit is not None and concurrency_limit < 1:
            raise InvalidRequestError(
                f"concurrency_limit must be at least 1, or None for no limit, got "
                f"{concurrency_limit}.",
                param="concurrency_limit",
            )
        all_params = [prompt_params(params)] * len(prompts)
        with self._turn():
            requests = self._process_inputs(prompts, all_params, priority)
            vocab_size = self.model_info.vocab_size
            searches = [BeamSearch(r, params, vocab_size=vocab_size) for r in requests]
            with tqdm(
                total=len(prompts), desc="Searched prompts", unit="req", disable=not use_tqdm
            ) as progress:
                self._search(searches, concurrency_limit or len(searches), progress)
        return [search.output(self._engine.tokenizer) for search in searches]

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        priority: int | Sequence[int] | None = None,
        cuts_max_tokens: bool = False,
    ) -> list[RequestOutput]:
        """Answers one conversation or several, each a list of `{"role": ..., "content": ...}`.

        Args:
            sampling_params: See `generate`.
            chat_template: A jinja template that replaces the model's.
            chat_template_kwargs: Further variables of the template.
            cuts_max_tokens: See `generate`.

        Raises:
            InvalidRequestError: See `generate`. Also if the model has no chat template, or the
                template rejects the messages.
        """
        template = self._engine.chat_template
        if chat_template is not None:
            tokenizer = self._engine.tokenizer
            special_tokens = tokenizer.special_tokens if tokenizer is not None else {}
            template = ChatTemplate(chat_template, special_tokens=special_tokens)
        if template is None:
            raise InvalidRequestError(
                "this model has no chat template; pass chat_template, or use generate.",
                param="chat_template",
            )
        is_single = bool(messages) and isinstance(messages[0], Mapping)
        render = functools.partial(
            template.render,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=chat_template_kwargs,
        )
        prompts = []
        for conversation in [messages] if is_single else messages:
            text = render(conversation)
            # The template contains BOS.
            prompts.append({"prompt": text, "add_special_tokens": False})
            if self._engine.model_info.saves_states:
                num_chars = count_leading_chars(text, conversation, render)
                prompts[-1]["num_leading_chars"] = num_chars
        return self.generate(
            prompts,
            sampling_params,
            use_tqdm=use_tqdm,
            priority=priority,
            cuts_max_tokens=cuts_max_tokens,
        )

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Clears the prefix cache. While blocks are in use, changes nothing and returns False.

        Args:
            reset_running_requests: Preempt all running requests first; they are computed again.
        """
        with self._turn():
            reply = self._client.call("reset_prefix_cache", reset_running_requests)
            return msgspec.json.decode(reply, type=bool)

    def explain_prefix_cache_miss(self, request_id: str) -> PrefixCacheMiss:
        """Explains why a request did not find more of its prompt in the prefix cache.

        Args:
            request_id: The id in a `RequestOutput`. For a request with `n` above 1, pass
                `0_{request_id}`, because only the first completion looks up the prompt.

        Raises:
            PaxkvError: The engine has no record of the request.
        """
        with self._turn():
            reply = self._client.call("explain_prefix_cache_miss", request_id)
            return msgspec.json.decode(reply, type=PrefixCacheMiss)

    def get_stats(self) -> SchedulerStats:
        """Fetches the current statistics. With several engines, sums; `engines` has each one's."""
        with self._turn():
            return msgspec.json.decode(self._client.call("get_stats"), type=SchedulerStats)

    def close(self) -> None:
        """Ends the engine; later calls raise EngineDeadError.

        Does nothing in a fork of the process that created the LLM.
        """
        self._finalizer()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Holds the lock, so that only one thread at a time calls the client."""
        # Before the lock: in a fork it may be locked forever, because its owner thread is missing.
        self._owner.check()
        with self._lock:
            yield

    def _process_inputs(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Sequence[SamplingParams],
        priority: int | Sequence[int] | None,
        *,
        cuts_max_tokens: bool = False,
    ) -> list[EngineRequest]:
        priorities = _one_for_each("priority", 0 if priority is None else priority, len(prompts))
        first = self._num_requests
        self._num_requests += len(prompts)
        return [
            self._engine.input_processor.process(
                prompt,
                params,
                request_id=str(request_num),
                priority=request_priority,
                cuts_max_tokens=cuts_max_tokens,
            )
            for request_num, (prompt, params, request_priority) in enumerate(
                zip(prompts, sampling_params, priorities, strict=True), start=first
            )
        ]

    def _run(
        self, requests: list[EngineRequest], texts: list[str | None], progress: tqdm
    ) -> list[RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        try:
            for request, text in zip(requests, texts, strict=True):
                self._client.add_request(request, prompt=text)
            forms = {r.request_id: r.sampling_params.structured_outputs for r in requests}
            while len(finished) < len(requests):
                for output in self._client.wait_for_outputs():
                    _check_completed(output, forms.get(output.request_id))
                    finished[output.request_id] = output
                    progress.update()
        except BaseException:
            # Also after KeyboardInterrupt, so that no requests continue without a caller.
            self._abort_all([request.request_id for request in requests])
            raise
        return [
            dataclasses.replace(
                finished[request.request_id],
                ignored_schema_keywords=self._engine.input_processor.ignored_keywords(
                    request.sampling_params
                ),
            )
            for request in requests
        ]

    def _search(self, searches: list[BeamSearch], concurrency_limit: int, progress: tqdm) -> None:
        """Runs all searches to their end. Each proceeds independently of the others' steps."""
        waiting = deque(searches)
        # Engine's request id -> its search.
        pending: dict[str, BeamSearch] = {}
        num_running = 0
        try:
            while waiting or pending:
                while waiting and num_running < concurrency_limit:
                    self._send_step(waiting.popleft(), pending)
                    num_running += 1
                for output in self._client.wait_for_outputs():
                    if self._advance(pending.pop(output.request_id), output, pending):
                        num_running -= 1
                        progress.update()
        except BaseException:
            self._abort_all([i for search in searches for i in search.request_ids])
            raise

    def _send_step(self, search: BeamSearch, pending: dict[str, BeamSearch]) -> int:
        """Sends a search's next requests; returns their number."""
        requests = search.next_requests()
        for request in requests:
            self._client.add_request(request)
            pending[request.request_id] = search
        return len(requests)

    def _advance(
        self, search: BeamSearch, output: RequestOutput, pending: dict[str, BeamSearch]
    ) -> bool:
        """Records an output. At the end of a step, sends the next one; True if there is none."""
        if not search.record_output(output):
            return False
        self._client.abort(search.released_ids)
        search.clear_released_ids()
        return self._send_step(search, pending) == 0

    def _abort_all(self, request_ids: list[str]) -> None:
        with contextlib.suppress(EngineDeadError):
            self._client.abort(request_ids)


def _close_in_owner(owner: OwnerProcess, transport: EngineTransport) -> None:
    if owner.is_current:
        transport.close()


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Returns a list of prompts, also for a single prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidRequestError(
            f"prompts must be a prompt or a list of prompts, got {type(prompts).__name__}.",
            param="prompt",
        )
    # [1, 2, 3] is one prompt of token ids.
    if prompts and isinstance(prompts[0], int):
        return [prompts]
    return list(prompts)


def _as_names(names: str | Sequence[str] | None) -> tuple[str, ...]:
    if names is None or isinstance(names, str):
        return (names,) if names else ()
    return tuple(names)


def _one_for_each(
    name: str, values: object, num_prompts: int
) -> Sequence[SamplingParams] | Sequence[int]:
    if not isinstance(values, Sequence):
        return [values] * num_prompts
    if len(values) != num_prompts:
        raise InvalidRequestError(
            f"{name} has {len(values)} entries for {num_prompts} prompts; pass one value for all "
            "prompts, or one for each.",
            param=name,
        )
    return values


def _check_completed(output: RequestOutput, form: StructuredOutputsParams | None) -> None:
    for completion in output.outputs:
        if completion.finish_reason != "error":
            continue
        # If the engine gives a reason as text, the request's grammar caused the error.
        if isinstance(completion.stop_reason, str):
            param = "structured_outputs" if form is None else form.field_of().name
            raise InvalidRequestError(completion.stop_reason, param=param)
        raise InvariantError(
            f"the engine refused request {output.request_id}, although it was checked before. The "
            "engine's log contains the reason."
        )


def _model_config(**settings: object) -> ModelConfig:
    """Builds the config. A setting that is None gets its default, as in vLLM."""
    return ModelConfig(**{name: value for name, value in settings.items() if value is not None})


def _read_setting(name: str, value: object) -> object:
    if name == "speculative_config" and isinstance(value, Mapping):
        return SpeculativeConfig.from_fields(value)
    return value if isinstance(value, SpeculativeConfig) else json_text(value)


def _engine_config(model_config: ModelConfig, settings: Mapping[str, object]) -> EngineConfig:
    """Builds the config: passes each setting to the part that has a field of this name."""
    parts = {
        "cache": CacheConfig,
        "scheduler": SchedulerConfig,
        "runner": RunnerConfig,
        "parallel": ParallelConfig,
    }
    names = {
        part: {field.name for field in dataclasses.fields(config_class)}
        for part, config_class in parts.items()
    }
    known = set().union(*names.values())
    unknown = sorted(set(settings) - known)
    if unknown:
        raise TypeError(
            f"LLM() has no argument {', '.join(unknown)}; settings are {', '.join(sorted(known))}."
        )
    # As in vLLM, None is the default.
    settings = {n: _read_setting(n, value) for n, value in settings.items() if value is not None}
    return EngineConfig(
        model=model_config,
        **{
            part: config_class(**{k: v for k, v in settings.items() if k in names[part]})
            for part, config_class in parts.items()
        },
    )
