"""What the server needs of an engine: everything behind these Protocols is another layer."""

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
    """Text to token ids and back; `paxkv.text` has the real one."""

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """By the names that chat templates use, such as "eos_token"."""
        ...

    @property
    def config(self) -> Mapping[str, object]:
        """Content of tokenizer_config.json."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token, which may be a part of a character."""
        ...

    def id_to_token(self, token_id: int) -> str | None:
        """Name in the vocabulary, or None when there is none."""
        ...


class ChatTemplate(Protocol):
    """Messages to prompt text; `paxkv.text` has the real one."""

    @property
    def source(self) -> str | None:
        """The jinja template of requests without tools."""
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
    """An engine, as the routes see it."""

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
        """Tokens of all requests so far: also while they run, and where they were aborted."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether new requests are accepted."""
        ...

    @property
    def problem(self) -> PaxkvError | None:
        """Why requests cannot be answered now; None if they can."""
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
            stream: True yields the new part of text and tokens each time, of those completions
                that have one; False yields once, at the end.

        Raises:
            InvalidRequestError: Before the first item.
            EngineDeadError: The engine ended.
        """
        ...

    def beam_search(
        self, prompt: Prompt, params: BeamSearchParams, *, request_id: str, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        """Runs one beam search and yields once, at the end; else as `generate`."""
        ...

    async def check(self, prompt: Prompt, params: SamplingParams | BeamSearchParams) -> None:
        """Looks for mistakes of the caller, and runs nothing; compiles no grammar.

        Raises:
            InvalidRequestError: `generate` or `beam_search` would raise it.
        """
        ...

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forgets all cached prefixes; False, and nothing changed, while blocks are in use."""
        ...

    async def explain_prefix_cache_miss(self, request_id: str) -> PrefixCacheMiss:
        """Why a request did not find more of its prompt in the prefix cache.

        Raises:
            InvalidRequestError: It is not among the latest requests of `generate`.
            PaxkvError: The engine does not know it, or not any more.
        """
        ...

    async def start_profile(self, folder: str) -> bool:
        """Begins to record with JAX's profiler; False while a recording runs."""
        ...

    async def stop_profile(self) -> bool:
        """Writes what was recorded; False where nothing was."""
        ...

    async def get_stats(self) -> SchedulerStats:
        """A fresh snapshot from the engine."""
        ...

    async def inspect(self, after_seq: int, wants_snapshot: bool, *, keeps_tokens: bool) -> str:
        """JSON of an `Inspection`: what changed since the call that answered `after_seq`."""
        ...

    async def inspect_block(
        self, block_id: int, holder_key: int, *, with_tokens: bool
    ) -> BlockDetails:
        """One block as it is now."""
        ...

    async def close(self, *, drain_timeout_s: float) -> None:
        """Ends the engine; requests that are not finished by then end with EngineDeadError."""
        ...
