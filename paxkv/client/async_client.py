"""`AsyncEngineClient`: runs many concurrent requests on one asyncio loop."""

import asyncio
import contextlib
import dataclasses
import functools
import logging
from collections.abc import AsyncIterator

import msgspec

from paxkv.client.beam_search import BeamSearch, prompt_params
from paxkv.client.engine_calls import EngineCalls
from paxkv.client.grammar_threads import GrammarThreads
from paxkv.client.input_processor import InputProcessor, Prompt, text_of_prompt
from paxkv.client.long_text import process_in_thread_if_long
from paxkv.client.output_processor import OutputKind, OutputProcessor
from paxkv.client.output_stream import OutputStream
from paxkv.client.request_streams import RequestStreams
from paxkv.client.waiting_budget import DEFAULT_MAX_WAITING_BYTES
from paxkv.config.sampling_params import BeamSearchParams, SamplingParams
from paxkv.contracts.engine_output import (
    EngineDead,
    EngineOutput,
    SchedulerStats,
    StepOutputs,
    UtilityReply,
)
from paxkv.contracts.engine_request import (
    AbortRequests,
    AddRequest,
    EngineRequest,
    Shutdown,
)
from paxkv.contracts.engine_start import EngineReady, ModelInfo
from paxkv.contracts.observation import BlockDetails, PrefixCacheMiss
from paxkv.contracts.owner_process import OwnerProcess
from paxkv.contracts.request_output import RequestOutput, TokenTotals
from paxkv.contracts.wire import LoopTransport
from paxkv.errors import (
    EngineDeadError,
    EngineStalledError,
    InvalidRequestError,
    PaxkvError,
)
from paxkv.fleet.stats_sum import keep_expert_tokens, stop_running
from paxkv.text.chat_template import ChatTemplate
from paxkv.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Time for the engine's last message after the transport was closed. The message is late only if the
# engine's last step hangs.
LAST_MESSAGE_S = 5.0
# Number of latest requests for which `explain_prefix_cache_miss` works.
MAX_LATEST_REQUESTS = 1024


class AsyncEngineClient:
    """The HTTP server's client of an engine. Call every method on the loop of `start`.

    When the engine dies, every request and call ends with EngineDeadError. The transport may start
    another engine. Until it is ready, new requests fail with an EngineDeadError that says when to
    retry. In a fork of the process that created the client, they fail with ForkedProcessError.

    Args:
        tokenizer: The model's tokenizer; None if it was loaded without one.
        chat_template: The model's chat template, if it has one.
        max_waiting_bytes: Limit on the bytes of all answers that wait for slow readers.
    """

    def __init__(
        self,
        transport: LoopTransport,
        input_processor: InputProcessor,
        output_processor: OutputProcessor,
        model_info: ModelInfo,
        *,
        tokenizer: Tokenizer | None = None,
        chat_template: ChatTemplate | None = None,
        max_waiting_bytes: int = DEFAULT_MAX_WAITING_BYTES,
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self._owner = OwnerProcess("this client")
        self._transport = transport
        self._input_processor = input_processor
        self._output_processor = output_processor
        self._model_info = model_info
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dead: EngineDead | None = None
        # Set when the engine has ended and will not be restarted.
        self._has_ended = asyncio.Event()
        self._is_closing = False
        self._streams = RequestStreams(
            output_processor,
            abort_in_engine=self._abort_in_engine,
            max_waiting_bytes=max_waiting_bytes,
        )
        # Caller's request id -> id of the engine's request that computed the prompt, oldest first.
        self._latest_engine_ids: dict[str, str] = {}
        self._grammar_threads = GrammarThreads()
        self._calls = EngineCalls(transport)
        self._latest_stats = SchedulerStats()

    @property
    def model_info(self) -> ModelInfo:
        return self._model_info

    @property
    def latest_stats(self) -> SchedulerStats:
        """Statistics of the last step, or of the engine's start if no step has run."""
        return self._latest_stats

    @property
    def token_totals(self) -> TokenTotals:
        """Tokens of all requests so far, also on engines that died."""
        return self._output_processor.token_totals

    @property
    def is_alive(self) -> bool:
        """True if new requests can be served."""
        return self._loop is not None and self._dead is None and not self._is_closing

    @property
    def problem(self) -> PaxkvError | None:
        """Why requests cannot be answered now; None if they can.

        An EngineDeadError if no engine runs, an EngineStalledError if it makes no progress.
        """
        try:
            self._check_alive()
        except EngineDeadError as error:
            return error
        stall = self._transport.stall
        if stall is None:
            return None
        num_requests = len(self._streams)
        return EngineStalledError(f"{num_requests} unfinished requests, and {stall}")

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._streams)

    async def start(self) -> None:
        """Starts to receive messages; returns after the engine's first reply.

        Raises:
            EngineDeadError: The engine has ended already.
        """
        self._owner.check()
        self._loop = asyncio.get_running_loop()
        self._transport.deliver_on(self._loop, self._on_message)
        self._latest_stats = await self.get_stats()

    async def wait_until_ended(self) -> str:
        """Waits until the engine has ended and will not be restarted; returns the reason."""
        await self._has_ended.wait()
        assert self._dead is not None
        return self._dead.reason

    async def close(self, *, drain_timeout_s: float) -> None:
        """Ends the engine. Does nothing in a fork of the process that created the client.

        Args:
            drain_timeout_s: Time in which requests may finish. The others end with EngineDeadError.
        """
        if not self._owner.is_current:
            return
        self._is_closing = True
        self._grammar_threads.close()
        if self._input_processor.grammar_checker is not None:
            self._input_processor.grammar_checker.close()
        if self._dead is None and self._loop is not None and drain_timeout_s > 0:
            with contextlib.suppress(EngineDeadError):
                self._transport.send(Shutdown(drain=True))
            await self._wait_until_ended(drain_timeout_s)
        await asyncio.to_thread(self._transport.close)
        if self._loop is not None:
            await self._wait_until_ended(LAST_MESSAGE_S)

    async def _wait_until_ended(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._has_ended.wait(), timeout_s)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        stream: bool,
    ) -> AsyncIterator[RequestOutput]:
        """Runs a request. Closing the iterator before its end aborts the request in the engine.

        Args:
            request_id: Unique among unfinished requests.
            stream: True yields deltas, merged if several have arrived. False yields one output at
                the end. In both cases the last output has a finish reason.

        Raises:
            InvalidRequestError: The request is invalid; raised before the first output.
            EngineDeadError: The engine has ended.
        """
        outputs = self._open_stream(request_id)
        try:
            request = await self._process_input(
                prompt, sampling_params, request_id=outputs.engine_request_id, priority=priority
            )
            request = dataclasses.replace(request, is_streamed=stream)
            ignored_keywords = self._input_processor.ignored_keywords(sampling_params)
            output_kind = "delta" if stream else "final_only"
            first_id = self._send_request(outputs, request, text_of_prompt(prompt), output_kind)
            self._record_engine_id(request_id, first_id)
            if outputs.is_aborted:  # while its prompt was tokenized
                await self.abort(request_id)
            while True:
                # Merges the deltas that wait, so an overloaded loop sends fewer, longer pieces.
                output = await outputs.next_output()
                yield dataclasses.replace(
                    output, request_id=request_id, ignored_schema_keywords=ignored_keywords
                )
                if output.finished:
                    return
        finally:
            self._streams.close(outputs)

    async def beam_search(
        self, prompt: Prompt, params: BeamSearchParams, *, request_id: str, priority: int = 0
    ) -> AsyncIterator[RequestOutput]:
        """Runs a beam search and yields one output: the sequences as completions, best first.

        Each step sends new requests to the engine. An engine that drains rejects them.

        Args:
            request_id: See `generate`.

        Raises:
            InvalidRequestError: The request is invalid.
            EngineDeadError: The engine has ended, or is shutting down and accepts no further step.
        """
        stream = self._open_stream(request_id)
        search: BeamSearch | None = None
        try:
            request = await self._process_input(
                prompt,
                prompt_params(params),
                request_id=stream.engine_request_id,
                priority=priority,
            )
            search = BeamSearch(request, params, vocab_size=self._model_info.vocab_size)
            while (requests := search.next_requests()) and not stream.is_aborted:
                for step_request in requests:
                    self._send_request(stream, step_request, None, "final_only")
                await self._finish_search_step(stream, search, len(requests))
            yield RequestOutput(
                request_id=request_id,
                prompt=text_of_prompt(prompt),
                prompt_token_ids=search.prompt_token_ids,
                outputs=search.completions(self.tokenizer, is_aborted=stream.is_aborted),
                finished=True,
                num_cached_tokens=search.num_cached_tokens,
                num_truncated_tokens=request.num_truncated_tokens,
            )
        finally:
            self._streams.close(stream)
            self._abort_in_engine([] if search is None else search.request_ids)

    async def check(self, prompt: Prompt, params: SamplingParams | BeamSearchParams) -> None:
        """Validates a request without running it. Does not compile a new grammar.

        Raises:
            InvalidRequestError: `generate` or `beam_search` would raise it.
        """
        if isinstance(params, BeamSearchParams):
            params = prompt_params(params)
        checks_grammar = self._input_processor.unchecked_grammar(params) is None
        process = functools.partial(
            self._input_processor.process,
            prompt,
            params,
            request_id="checked",
            checks_grammar=checks_grammar,
        )
        await process_in_thread_if_long(prompt, process)

    async def abort(self, request_id: str) -> None:
        """Ends a request; its iterator yields a last output with finish reason "abort".

        Ignores unknown and finished ids.
        """
        self._streams.abort(request_id)

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Clears the prefix cache. While blocks are in use, changes nothing and returns False.

        With several engines, each one clears its cache if it can; False if at least one could not.

        Args:
            reset_running_requests: Preempt all running requests first; they are computed again.
        """
        reply = await self._call("reset_prefix_cache", reset_running_requests)
        return msgspec.json.decode(reply, type=bool)

    async def explain_prefix_cache_miss(self, request_id: str) -> PrefixCacheMiss:
        """Explains why a request did not find more of its prompt in the prefix cache.

        The answer contains facts about other requests' prompts, so give it only to the operator.

        Raises:
            InvalidRequestError: The request is not among the latest requests of `generate`.
            PaxkvError: The engine has no record of the request.
        """
        engine_id = self._latest_engine_ids.get(request_id)
        if engine_id is None:
            raise InvalidRequestError(
                f"request_id {request_id!r} is not among the last {MAX_LATEST_REQUESTS} requests. "
                "Send the id of a recent request.",
                param="request_id",
            )
        reply = await self._call("explain_prefix_cache_miss", engine_id)
        miss = msgspec.json.decode(reply, type=PrefixCacheMiss)
        return dataclasses.replace(miss, request_id=request_id)

    async def start_profile(self, folder: str) -> bool:
        """Starts a recording with JAX's profiler; False if one is running already."""
        return msgspec.json.decode(await self._call("start_profile", folder), type=bool)

    async def stop_profile(self) -> bool:
        """Writes the recording to disk; False if none was running. Blocks steps meanwhile."""
        return msgspec.json.decode(await self._call("stop_profile"), type=bool)

    async def get_stats(self) -> SchedulerStats:
        """Fetches the current statistics."""
        return msgspec.json.decode(await self._call("get_stats"), type=SchedulerStats)

    async def inspect(self, after_seq: int, wants_snapshot: bool, *, keeps_tokens: bool) -> str:
        """Returns the JSON of an `Inspection` with the changes since `after_seq`."""
        return await self._call("inspect", after_seq, wants_snapshot, keeps_tokens)

    async def inspect_block(
        self, block_id: int, holder_key: int, *, with_tokens: bool
    ) -> BlockDetails:
        """Describes the current state of a block; see `InspectionRecorder.inspect_block`."""
        reply = await self._call("inspect_block", block_id, holder_key, with_tokens)
        return msgspec.json.decode(reply, type=BlockDetails)

    def _open_stream(self, request_id: str) -> OutputStream:
        self._check_alive()
        return self._streams.open(request_id)

    def _send_request(
        self,
        stream: OutputStream,
        request: EngineRequest,
        prompt: str | None,
        output_kind: OutputKind,
    ) -> str:
        """Sends a request to the engine; returns the id of the child that computes its prompt."""
        self._check_alive()
        children = self._streams.add_request(stream, request, prompt, output_kind)
        for child in children:
            self._transport.send(AddRequest(request=child))
        return children[0].request_id

    def _record_engine_id(self, request_id: str, engine_id: str) -> None:
        self._latest_engine_ids.pop(request_id, None)
        self._latest_engine_ids[request_id] = engine_id
        if len(self._latest_engine_ids) > MAX_LATEST_REQUESTS:
            del self._latest_engine_ids[next(iter(self._latest_engine_ids))]

    async def _process_input(
        self, prompt: Prompt, sampling_params: SamplingParams, *, request_id: str, priority: int
    ) -> EngineRequest:
        grammar = self._input_processor.unchecked_grammar(sampling_params)
        if grammar is not None:
            await self._grammar_threads.check(self._input_processor.grammar_checker, grammar)
        process = functools.partial(
            self._input_processor.process,
            prompt,
            sampling_params,
            request_id=request_id,
            priority=priority,
        )
        return await process_in_thread_if_long(prompt, process)

    def _check_alive(self) -> None:
        self._owner.check()
        if self._dead is not None:
            raise _dead_error(self._dead)
        if self._loop is None or self._is_closing:
            raise EngineDeadError("the engine is shutting down or was not started.")

    async def _finish_search_step(
        self, stream: OutputStream, search: BeamSearch, num_requests: int
    ) -> None:
        """Receives the outputs of one step of a beam search."""
        outputs = [await stream.next_output() for _ in range(num_requests)]
        if stream.is_aborted:
            return
        for output in outputs:
            search.record_output(output)
        self._abort_in_engine(search.released_ids)
        search.clear_released_ids()

    def _abort_in_engine(self, engine_request_ids: list[str]) -> None:
        if not engine_request_ids:
            return
        # A dead engine has nothing to abort, and a fork must not abort its parent's requests.
        with contextlib.suppress(EngineDeadError):
            self._owner.check()
            self._transport.send(AbortRequests(request_ids=engine_request_ids))

    async def _call(self, method: str, *arguments: str | int | bool) -> str:
        self._owner.check()
        if self._dead is not None:
            raise _dead_error(self._dead)
        if self._loop is None:
            raise EngineDeadError("the engine was not started.")
        return await self._calls.call(method, *arguments)

    def _on_message(self, message: EngineOutput | EngineReady) -> None:
        try:
            self._handle_message(message)
        # Without this, the loop would log the error and callers would wait forever.
        except Exception as error:
            logger.exception("a message of the engine could not be used")
            self._transport.give_up(f"{type(error).__name__}: {error}")

    def _handle_message(self, message: EngineOutput | EngineReady) -> None:
        if self._dead is not None and not isinstance(message, EngineReady | EngineDead):
            # A late message of an engine that was given up; its requests have ended.
            return
        if isinstance(message, StepOutputs):
            self._latest_stats = keep_expert_tokens(message.stats, self._latest_stats)
            processed = self._output_processor.process(message)
            self._abort_in_engine(processed.request_ids_to_abort)
            self._streams.deliver(processed.request_outputs)
            self._streams.end_failed(processed.errors)
        elif isinstance(message, UtilityReply):
            self._calls.on_reply(message)
        elif isinstance(message, EngineReady):
            self._dead = None
            self._latest_stats = message.stats
        elif message.request_ids is not None:
            processed = self._output_processor.end_with_engine(message)
            self._abort_in_engine(processed.request_ids_to_abort)
            self._streams.end_failed(processed.errors)
        else:
            self._on_dead(message)

    def _on_dead(self, message: EngineDead) -> None:
        self._dead = message
        if message.retry_after_s is None:
            self._has_ended.set()
        if not self._is_closing:
            logger.error("%s", _dead_error(message))
        self._latest_stats = stop_running(self._latest_stats)
        # The next engine knows none of these requests.
        self._latest_engine_ids.clear()
        make_error = functools.partial(_dead_error, message)
        self._calls.fail_all(make_error)
        self._streams.fail_all(make_error)


def _dead_error(message: EngineDead) -> EngineDeadError:
    text = f"the engine has ended: {message.reason}"
    if message.retry_after_s is not None:
        text = f"{text.rstrip('.')}. Another is being started: try again later."
    return EngineDeadError(text, retry_after_s=message.retry_after_s)
