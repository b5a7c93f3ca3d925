"""`LLM`: the offline door: the same engine as the server's, called from Python."""

import contextlib
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence

import msgspec
from tqdm import tqdm

from paxkv.build import build_engine, build_llm_client
from paxkv.client.input_processor import Prompt, text_of_prompt
from paxkv.config import (
    CacheConfig,
    Dtype,
    EngineConfig,
    LoadFormat,
    ModelConfig,
    SchedulerConfig,
    SchedulerPolicy,
)
from paxkv.contracts.engine_output import SchedulerStats
from paxkv.contracts.engine_request import EngineRequest
from paxkv.contracts.model_info import ModelInfo
from paxkv.contracts.request_output import RequestOutput
from paxkv.errors import EngineDeadError, InvalidRequestError, InvariantError
from paxkv.sampling_params import SamplingParams
from paxkv.text.chat_template import ChatTemplate, Message
from paxkv.text.tokenizer import Tokenizer

Conversation = Sequence[Message]


class LLM:
    """A model loaded for generating text from Python.

    Requests of one call are batched together; calls from several threads take turns. Use it as a
    context manager, or `close` it, to free the device's memory early.

    Args:
        model: Folder of a Hugging Face checkpoint or name on the hub; None is the embedded demo.
        dtype: "auto" is float32 on the CPU and the checkpoint's own elsewhere.
        seed: Of random weights and of requests that bring no seed.
        max_model_len: Most tokens of prompt and output together; None is the model's own limit.

    The other arguments are fields of `paxkv.config`, explained there.

    Raises:
        TypeError: An argument of another name.
        ConfigError: The settings do not fit each other, the model or the device.
        ModelError: The model cannot be loaded.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        dtype: Dtype = "auto",
        seed: int = 0,
        max_model_len: int | None = None,
        load_format: LoadFormat = "auto",
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        enable_chunked_prefill: bool = True,
        long_prefill_token_threshold: int = 0,
        scheduling_policy: SchedulerPolicy = "fcfs",
        block_size: int = 16,
        enable_prefix_caching: bool = True,
        num_gpu_blocks_override: int | None = None,
        gpu_memory_utilization: float = 0.9,
        cpu_kv_cache_bytes: int = 256 * 2**20,
        prefix_caching_seed: str | None = None,
    ) -> None:
        config = EngineConfig(
            model=ModelConfig(
                model=None if model is None else str(model),
                dtype=dtype,
                seed=seed,
                max_model_len=max_model_len,
                load_format=load_format,
            ),
            cache=CacheConfig(
                block_size=block_size,
                enable_prefix_caching=enable_prefix_caching,
                num_gpu_blocks_override=num_gpu_blocks_override,
                gpu_memory_utilization=gpu_memory_utilization,
                cpu_kv_cache_bytes=cpu_kv_cache_bytes,
                prefix_caching_seed=prefix_caching_seed,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                enable_chunked_prefill=enable_chunked_prefill,
                long_prefill_token_threshold=long_prefill_token_threshold,
                policy=scheduling_policy,
            ),
        )
        self._engine = build_engine(config, show_progress=sys.stderr.isatty())
        self._client = build_llm_client(self._engine)
        self._lock = threading.Lock()
        self._num_requests = 0
        # Also when the LLM is forgotten, and at the interpreter's exit.
        self._finalizer = weakref.finalize(self, self._engine.transport.close)

    @property
    def model_info(self) -> ModelInfo:
        return self._engine.model_info

    def get_tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, or None when it has none."""
        return self._engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts, many at once, and returns them in the order they came.

        Args:
            prompts: Text, a list of token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`;
                or a list of these.
            sampling_params: One for all prompts or one for each; the defaults if left out.
            use_tqdm: Draws a progress bar on stderr.
            priority: One for all prompts or one for each; lower runs first, and only under the
                scheduling policy "priority".

        Raises:
            InvalidRequestError: A prompt or its parameters are at fault. Nothing was run.
            EngineDeadError: The engine has ended.
        """
        prompts = _as_prompts(prompts)
        if sampling_params is None:
            sampling_params = SamplingParams()
        sampling_params = _one_for_each("sampling_params", sampling_params, len(prompts))
        priorities = _one_for_each("priority", 0 if priority is None else priority, len(prompts))
        with self._lock:
            first = self._num_requests
            self._num_requests += len(prompts)
            requests = [
                self._engine.input_processor.process(
                    prompt, params, request_id=str(request_num), priority=request_priority
                )
                for request_num, (prompt, params, request_priority) in enumerate(
                    zip(prompts, sampling_params, priorities, strict=True), start=first
                )
            ]
            texts = [text_of_prompt(prompt) for prompt in prompts]
            with tqdm(
                total=len(prompts), desc="Processed prompts", unit="req", disable=not use_tqdm
            ) as progress:
                return self._run(requests, texts, progress)

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
    ) -> list[RequestOutput]:
        """Answers one conversation or several, each a list of `{"role": ..., "content": ...}`.

        Args:
            chat_template: A jinja template instead of the model's own.
            chat_template_kwargs: Further variables of the template.

        Raises:
            InvalidRequestError: As `generate`; also when the model has no chat template, or the
                template refuses the messages.
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
        prompts = [
            {
                "prompt": template.render(
                    conversation,
                    add_generation_prompt=add_generation_prompt,
                    template_kwargs=chat_template_kwargs,
                ),
                # The template writes BOS itself.
                "add_special_tokens": False,
            }
            for conversation in ([messages] if is_single else messages)
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, priority=priority)

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; False while requests still use blocks."""
        with self._lock:
            return msgspec.json.decode(self._client.call("reset_prefix_cache"), type=bool)

    def get_stats(self) -> SchedulerStats:
        """The engine's statistics as of now."""
        with self._lock:
            return msgspec.json.decode(self._client.call("get_stats"), type=SchedulerStats)

    def close(self) -> None:
        """Ends the engine; later calls raise EngineDeadError."""
        self._finalizer()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _run(
        self, requests: list[EngineRequest], texts: list[str | None], progress: tqdm
    ) -> list[RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        try:
            for request, text in zip(requests, texts, strict=True):
                self._client.add_request(request, prompt=text)
            while len(finished) < len(requests):
                for output in self._client.wait_for_outputs():
                    _check_completed(output)
                    finished[output.request_id] = output
                    progress.update()
        except BaseException:
            # Also KeyboardInterrupt: what is queued must not run on without a caller.
            with contextlib.suppress(EngineDeadError):
                self._client.abort([request.request_id for request in requests])
            raise
        return [finished[request.request_id] for request in requests]


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several -> several."""
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


def _one_for_each(
    name: str, values: object, num_prompts: int
) -> Sequence[SamplingParams] | Sequence[int]:
    if not isinstance(values, Sequence):
        return [values] * num_prompts
    if len(values) != num_prompts:
        raise InvalidRequestError(
            f"{name} has {len(values)} entries for {num_prompts} prompts; send one for all or one "
            "for each.",
            param=name,
        )
    return values


def _check_completed(output: RequestOutput) -> None:
    if output.outputs[0].finish_reason == "error":
        raise InvariantError(
            f"the engine refused request {output.request_id}, which was checked before; its log "
            "says why."
        )
