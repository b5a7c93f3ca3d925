"""The Protocols through which the server uses an engine, a tokenizer and a chat template."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Protocol

from paxkv.config.sampling_params import BeamSearchParams, SamplingParams
from paxkv.contracts.engine_output import SchedulerStats
from paxkv.contracts.engine_start import ModelInfo
from paxkv.contracts.observation import BlockDetails, PrefixCacheMiss
from paxkv.contracts.request_output import RequestOutput, TokenTotals
from paxkv.errors import PaxkvError

# "text", [1, 2, 3], or {"prompt": "text", "add_special_tokens": False, "cache_salt": "tenant"}
Prompt = str | list[int] | Mapping[str, object]


class Tokenizer(Protocol):
    """Converts text to token ids and back. Implemented in `paxkv.text`."""

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Special tokens by their names in chat templates, such as "eos_token"."""
        ...

    @property
    def config(self) -> Mapping[str, object]:
        """The content of tokenizer_config.json."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, which may be only a part of a character."""
        ...

    def id_to_token(self, token_id: int) -> str | None:
        """The token's name in the vocabulary; None for an unknown id."""
        ...


class ChatTemplate(Protocol):
    """Renders messages to the text of a prompt. Implemented in `paxkv.text`."""

    @property
    def source(self) -> str | None:
        """The jinja template for requests without tools."""
        ...

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> str: ...


class EngineClient(Protocol):
    """The engine, as the routes use it."""

    @property
    def model_info(self) -> ModelInfo: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def chat_template(self) -> ChatTemplate | None: ...

    @property
    def latest_stats(self) -> SchedulerStats: ...

    @property
    def token_totals(self) -> TokenTotals:
        """Token counts of all requests so far, including running and aborted ones."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether the engine accepts new requests."""
        ...

    @property
    def problem(self) -> PaxkvError | None:
        """Why the engine cannot answer requests now; None if it can."""
        ...

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        stream: bool,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Runs one request; closing the iterator early aborts it in the engine.

        Args:
            stream: True yields new text and tokens as they arrive; each output contains only the
                completions that have new ones. False yields once, at the end.

        Raises:
            InvalidRequestError: The request is not valid. Raised before the first item.
            EngineDeadError: The engine ended.
        """
        ...

    def beam_search(
        self, prompt: Prompt, params: BeamSearchParams, *, request_id: str, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        """Runs one beam search and yields once, at the end; otherwise like `generate`."""
        ...

    async def check(self, prompt: Prompt, params: SamplingParams | BeamSearchParams) -> None:
        """Validates a request without running it and without compiling its grammar.

        Raises:
            InvalidRequestError: `generate` or `beam_search` would raise it.
        """
        ...

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Empties the prefix cache; False, with nothing changed, while requests use its blocks."""
        ...

    async def explain_prefix_cache_miss(self, request_id: str) -> PrefixCacheMiss:
        """Explains why a request did not find more of its prompt in the prefix cache.

        Raises:
            InvalidRequestError: The request is not among the latest ones of `generate`.
            PaxkvError: The engine has no record of the request.
        """
        ...

    async def start_profile(self, folder: str) -> bool:
        """Starts recording with JAX's profiler; False if it is already recording."""
        ...

    async def stop_profile(self) -> bool:
        """Ends and writes the recording; False if the profiler is not recording."""
        ...

    async def get_stats(self) -> SchedulerStats:
        """A fresh snapshot from the engine."""
        ...

    async def inspect(self, after_seq: int, wants_snapshot: bool, *, keeps_tokens: bool) -> str:
        """JSON of an `Inspection`: the changes since the call that returned `after_seq`."""
        ...

    async def inspect_block(
        self, block_id: int, holder_key: int, *, with_tokens: bool
    ) -> BlockDetails:
        """The current state of one block."""
        ...

    async def close(self, *, drain_timeout_s: float) -> None:
        """Closes the engine. Requests unfinished after the timeout end with EngineDeadError."""
        ...
