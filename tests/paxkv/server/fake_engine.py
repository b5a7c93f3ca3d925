"""An engine without a model: answers of known letters, at a known pace."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Mapping, Sequence

import msgspec

from paxkv.client.token_counter import TokenCounter
from paxkv.config.sampling_defaults import GenerationConfig, SamplingDefaults
from paxkv.config.sampling_params import BeamSearchParams, SamplingParams, check_num_logprobs
from paxkv.contracts.engine_output import SchedulerStats
from paxkv.contracts.engine_start import FeatureUse, ModelInfo
from paxkv.contracts.observation import BlockDetails, PrefixCacheMiss
from paxkv.contracts.request_output import CompletionOutput, Logprob, RequestOutput, TokenTotals
from paxkv.errors import (
    EngineDeadError,
    EngineStalledError,
    InvalidRequestError,
    PaxkvError,
    PromptTooLongError,
)
from paxkv.inspector.recorder import InspectionRecorder
from tests.paxkv.scheduler.stepping import make_scheduler

MODEL_NAME = "org/fake"
MAX_MODEL_LEN = 512
VOCAB_SIZE = 300
BOS = 256
NUM_CACHED_TOKENS = 2
# A prompt with this text in it makes the engine do what it says.
DIE_AFTER_3 = "die after three tokens"
FAIL_AFTER_3 = "raise a bug after three tokens"
NO_TOKENS = "hold the first token back for good"
GRAMMAR_FAILS = "let the grammar fail"
# What stands between these in a prompt is the answer to it, a letter a token, and then EOS.
SAY, SAID = "say this: ", " that is all"


class FakeTokenizer:
    """One token a UTF-8 byte; BOS in front when special tokens are wanted."""

    special_tokens: Mapping[str, str] = {}
    special_token_ids: frozenset[int] = frozenset()
    config: Mapping[str, object] = {"bos_token": "<s>"}

    def __init__(self) -> None:
        # Tokens besides the bytes, which tests may add.
        self.named_ids: dict[str, int] = {}

    def token_to_id(self, token: str) -> int | None:
        return self.named_ids.get(token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode("utf-8"))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        special = "" if skip_special_tokens else "<s>"
        return "".join(special if i == BOS else chr(i) for i in token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        return b"<s>" if token_id == BOS else bytes([token_id])

    def id_to_token(self, token_id: int) -> str | None:
        return f"<{token_id}>"


class FakeChatTemplate:
    """[{"role": "user", "content": "hi"}] -> "<user>hi<assistant>"."""

    source = "{{ messages }}"

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> str:
        names = "".join(f"<tool>{tool['function']['name']}" for tool in tools or ())
        text = names + "".join(f"<{m['role']}>{_joined(m['content'])}" for m in messages)
        return (
            text + (template_kwargs or {}).get("tail", "") + "<assistant>" * add_generation_prompt
        )


def _joined(content: str | list[Mapping[str, str]] | None) -> str:
    return content if isinstance(content, str) else "\n".join(p["text"] for p in content or ())


def answer_token_ids(prompt_token_ids: list[int], max_tokens: int, *, index: int = 0) -> list[int]:
    """Letters that depend on the prompt: [97], 3 tokens -> "tuv" (97 % 26 is 19, a "t").

    Completion `index` begins as many letters later, and is as many tokens shorter, but has one.
    """
    first = sum(prompt_token_ids) + index
    max_tokens = max(max_tokens - index, 1)
    return [ord("a") + (first + i) % 26 for i in range(max_tokens)]


class FakeEngine:
    """Implements `paxkv.server.engine_protocol.EngineClient`."""

    def __init__(self, *, seconds_per_token: float = 0.0) -> None:
        self.model_info = ModelInfo(
            served_model_name=MODEL_NAME,
            model="/models/fake",
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            max_fitting_tokens=10_000,
            created=1_700_000_000,
            max_num_seqs=8,
            cache_settings={"block_size": "16"},
            feature_uses=(FeatureUse(name="bursts", is_used=False, detail="it has none."),),
        )
        self.tokenizer = FakeTokenizer()
        self.chat_template = FakeChatTemplate()
        self.is_alive = True
        self.stall: EngineStalledError | None = None
        # As if this many tokens of each prompt had been cut.
        self.num_truncated_tokens = 0
        self.seconds_per_token = seconds_per_token
        # The engine has no block in use.
        self.recorder = InspectionRecorder(make_scheduler(num_blocks=16))
        self.running: set[str] = set()
        self.most_running = 0
        self.aborted: list[str] = []
        self.seen_params: list[SamplingParams] = []
        self.seen_priorities: list[int] = []
        self.seen_prompts: list[object] = []
        self.seen_request_ids: list[str] = []
        self.calls: list[tuple[object, ...]] = []
        self.token_counter = TokenCounter()
        # How many tokens stand for the whole vocabulary.
        self.tops_of_all = VOCAB_SIZE

    def set_sampling_defaults(self, *, limit: int | None = None, **fields: float) -> None:
        """As if `fields` were in the model's generation_config.json."""
        defaults = SamplingDefaults(
            generation_config=GenerationConfig(**fields), max_tokens_limit=limit
        )
        self.model_info = dataclasses.replace(self.model_info, sampling_defaults=defaults)

    @property
    def latest_stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running_reqs=len(self.running),
            kv_cache_usage=0.25,
            prefix_cache_queries=100,
            prefix_cache_hits=40,
            num_preemptions=3,
        )

    @property
    def token_totals(self) -> TokenTotals:
        return self.token_counter.totals

    async def get_stats(self) -> SchedulerStats:
        return self.latest_stats

    async def check(self, prompt: object, params: object) -> None:
        self._token_ids(prompt)

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        self.calls.append(("reset_prefix_cache", reset_running_requests))
        return reset_running_requests or not self.running

    async def explain_prefix_cache_miss(self, request_id: str) -> PrefixCacheMiss:
        if request_id not in self.seen_request_ids:
            raise InvalidRequestError(f"unknown {request_id}", param="request_id")
        return PrefixCacheMiss(
            request_id=request_id,
            reason="too_short",
            num_tokens=7,
        )

    async def start_profile(self, folder: str) -> bool:
        self.calls.append(("start_profile", folder))
        return len(self.calls) == 1

    async def stop_profile(self) -> bool:
        self.calls.append(("stop_profile",))
        return len(self.calls) < 4

    async def inspect(self, after_seq: int, wants_snapshot: bool, *, keeps_tokens: bool) -> str:
        self._check_alive()
        answer = self.recorder.inspect(after_seq, wants_snapshot, keeps_tokens)
        return msgspec.json.encode(answer).decode()

    async def inspect_block(
        self, block_id: int, holder_key: int, *, with_tokens: bool
    ) -> BlockDetails:
        self._check_alive()
        return self.recorder.inspect_block(block_id, holder_key, with_tokens)

    @property
    def problem(self) -> PaxkvError | None:
        try:
            self._check_alive()
        except EngineDeadError as error:
            return error
        return self.stall

    async def close(self, *, drain_timeout_s: float) -> None:
        self.is_alive = False

    async def generate(
        self,
        prompt: object,
        sampling_params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        stream: bool,
    ) -> AsyncGenerator[RequestOutput, None]:
        prompt_token_ids = self._token_ids(prompt)
        check_num_logprobs(
            "logprobs",
            sampling_params.logprobs,
            max_logprobs=self.model_info.max_logprobs,
            vocab_size=VOCAB_SIZE,
        )
        text = str(prompt)
        self.seen_params.append(sampling_params)
        self.seen_priorities.append(priority)
        self.seen_prompts.append(prompt)
        self.seen_request_ids.append(request_id)
        self._check_alive()
        assert request_id not in self.running
        self.running.add(request_id)
        self.most_running = max(self.most_running, len(self.running))
        is_done = False
        most = MAX_MODEL_LEN - len(prompt_token_ids)
        max_tokens = min(sampling_params.max_tokens or most, most)
        answers = [
            answer_token_ids(prompt_token_ids, max_tokens, index=index)
            for index in range(sampling_params.n)
        ]
        said = str(prompt.get("prompt")).partition(SAY)[2].partition(SAID)[0]
        if said:
            answers = [list(map(ord, said[:max_tokens]))] * sampling_params.n
            max_tokens = len(answers[0])
        if GRAMMAR_FAILS in text:
            failed = CompletionOutput(
                index=0,
                text="",
                token_ids=[],
                finish_reason="error",
                stop_reason="the grammar cannot go on: it is too large",
            )
            yield self._output(request_id, prompt_token_ids, [failed], is_done=True)
            self.running.discard(request_id)
            return
        reason = "stop" if said and max_tokens == len(said) else "length"
        form = sampling_params.structured_outputs
        has_ignored = form is not None and "uniqueItems" in form.source_text
        ignored = ("#/properties/a/uniqueItems",) if has_ignored else ()
        num_sent = 0
        num_logprobs = sampling_params.logprobs
        num_logprobs = self.tops_of_all if num_logprobs == -1 else num_logprobs
        try:
            for i in range(max_tokens):
                await self._compute(text, num_done=i)
                self._count_tokens(prompt_token_ids, answers, i)
                is_done = i + 1 == max_tokens
                if stream or is_done:
                    completions = [
                        _completion(index, answer, num_sent, i + 1, num_logprobs, reason)
                        for index, answer in enumerate(answers)
                        if len(answer) > num_sent
                    ]
                    output = self._output(
                        request_id, prompt_token_ids, completions, is_done=is_done
                    )
                    yield dataclasses.replace(output, ignored_schema_keywords=ignored)
                    num_sent = i + 1
        finally:
            self.running.discard(request_id)
            if not is_done:
                self.aborted.append(request_id)

    async def beam_search(
        self, prompt: object, params: BeamSearchParams, *, request_id: str, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        """Returns the sequences of `generate`, with logprobs even if not requested."""
        self.seen_params.append(params)
        prompt_token_ids = self._token_ids(prompt)
        default = self.model_info.sampling_defaults.generation_config.max_new_tokens
        answers = [
            answer_token_ids(prompt_token_ids, params.max_tokens or default, index=index)
            for index in range(params.beam_width)
        ]
        await self._compute(str(prompt), num_done=0)
        completions = [
            _completion(index, answer, 0, len(answer), 2 * params.beam_width)
            for index, answer in enumerate(answers)
        ]
        yield self._output(request_id, prompt_token_ids, completions, is_done=True)

    def _count_tokens(
        self, prompt_token_ids: list[int], answers: list[list[int]], idx: int
    ) -> None:
        if idx == 0:
            self.token_counter.count_prompt(len(prompt_token_ids), NUM_CACHED_TOKENS)
        num_going_on = sum(len(answer) > idx for answer in answers)
        # On a clock that stands still.
        self.token_counter.count_step({(1, 0.0 if idx else None): num_going_on}, 0.0)

    async def _compute(self, text: str, *, num_done: int) -> None:
        if NO_TOKENS in text:
            await asyncio.Event().wait()
        await asyncio.sleep(self.seconds_per_token)
        self._check_alive()
        if DIE_AFTER_3 in text and num_done == 3:
            self.is_alive = False
            self._check_alive()
        if FAIL_AFTER_3 in text and num_done == 3:
            raise RuntimeError("a secret of the inside")

    def _check_alive(self) -> None:
        if not self.is_alive:
            raise EngineDeadError("the engine has ended: pulled the plug")

    def _output(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        completions: list[CompletionOutput],
        *,
        is_done: bool,
    ) -> RequestOutput:
        return RequestOutput(
            request_id=request_id,
            prompt=None,
            prompt_token_ids=prompt_token_ids,
            outputs=completions,
            finished=is_done,
            num_cached_tokens=NUM_CACHED_TOKENS,
            num_truncated_tokens=self.num_truncated_tokens,
        )

    def _token_ids(self, prompt: object) -> list[int]:
        assert isinstance(prompt, Mapping)
        token_ids = prompt.get("prompt_token_ids")
        if token_ids is None:
            token_ids = self.tokenizer.encode(
                prompt["prompt"], add_special_tokens=prompt["add_special_tokens"]
            )
        if any(not 0 <= i < VOCAB_SIZE for i in token_ids):
            raise InvalidRequestError(f"token ids are in [0, {VOCAB_SIZE}).", param="prompt")
        if len(token_ids) >= MAX_MODEL_LEN:
            raise PromptTooLongError(f"the prompt has {len(token_ids)} tokens.", param="prompt")
        return token_ids


def _completion(
    index: int,
    answer: list[int],
    first: int,
    end: int,
    num_logprobs: int | None,
    finish_reason: str = "length",
) -> CompletionOutput:
    """The tokens `first` to `end` of an answer."""
    token_ids = answer[first:end]
    # Per token -1, -3, -5, -2, -4, -1 ... of completions 0, 1, 2, 3, 4, 5 ...
    likelihood = -(1.0 + 2 * index % 5)
    return CompletionOutput(
        index=index,
        text="".join(map(chr, token_ids)),
        token_ids=token_ids,
        cumulative_logprob=None if num_logprobs is None else likelihood * end,
        logprobs=None if num_logprobs is None else [_logprobs(i, num_logprobs) for i in token_ids],
        finish_reason=finish_reason if end >= len(answer) else None,
    )


def _logprobs(token_id: int, num_top: int) -> dict[int, Logprob]:
    """The drawn token is always the second most likely; the least likely one has -inf."""
    tops = {
        65 + k: Logprob(
            logprob=-float(k) if k < 4 else -float("inf"), rank=k + 1, decoded_token=chr(65 + k)
        )
        for k in range(num_top)
        if k != 1
    }
    return {token_id: Logprob(logprob=-1.0, rank=2, decoded_token=chr(token_id))} | tops
