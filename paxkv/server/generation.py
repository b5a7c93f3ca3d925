"""Runs the prompts of one HTTP request side by side in the engine."""

import asyncio
import dataclasses
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, nullcontext

from paxkv.config.sampling_params import BeamSearchParams, SamplingParams
from paxkv.contracts.request_output import CompletionOutput, RequestOutput
from paxkv.errors import InvalidRequestError, InvariantError, PaxkvError
from paxkv.server.engine_protocol import EngineClient, Prompt
from paxkv.server.metrics.server_metrics import ServerMetrics
from paxkv.server.middleware.admission import Admission, num_engine_requests
from paxkv.server.protocol.request_names import RequestNames

# (index of the prompt, its output)
IndexedOutputs = AsyncGenerator[tuple[int, RequestOutput], None]


@dataclasses.dataclass(frozen=True, slots=True)
class _Ended:
    """A prompt has no more outputs; `error` says so when it failed."""

    error: Exception | None = None


class Generator:
    """Sends prompts to the engine and times what comes back."""

    def __init__(
        self, engine: EngineClient, metrics: ServerMetrics, admission: Admission | None = None
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._admission = Admission(engine) if admission is None else admission
        metrics.note_engine(engine.latest_stats)
        self.names = RequestNames()

    def check_room(self, num_requests: int) -> None:
        """Looks whether `generate` would let so many in now.

        Raises:
            OverloadedError: It would not.
        """
        if not self._admission.has_room(num_requests):
            raise self._admission.refusal()

    async def generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | BeamSearchParams,
        *,
        priority: int,
        stream: bool,
    ) -> IndexedOutputs:
        """Outputs of all prompts as they come. Closing this, or one failure, aborts all of them.

        Args:
            stream: A beam search has its one output at the end all the same.

        Raises:
            OverloadedError: Before the first output: too many requests wait. What is wrong with
                the request itself is told first, but for its grammar, which is not compiled.
        """
        num_requests = num_engine_requests(len(prompts), sampling_params)
        if not self._admission.has_room(num_requests):
            for prompt in prompts:
                await self._engine.check(prompt, sampling_params)
            raise self._admission.refusal()
        with self._admission.place_for(num_requests):
            runs = [
                self._run(prompt, sampling_params, priority=priority, stream=stream)
                for prompt in prompts
            ]
            if len(runs) == 1:
                async with aclosing(runs[0]) as outputs:
                    async for output in outputs:
                        yield 0, output
                return
            # As long as there are prompts: enough for each to hand over one output without waiting.
            queue: asyncio.Queue[tuple[int, RequestOutput | _Ended]] = asyncio.Queue(len(runs))
            pumps = [asyncio.ensure_future(_pump(i, run, queue)) for i, run in enumerate(runs)]
            try:
                num_unfinished = len(runs)
                while num_unfinished:
                    prompt_idx, item = await queue.get()
                    if not isinstance(item, _Ended):
                        yield prompt_idx, item
                    elif item.error is not None:
                        raise item.error
                    else:
                        num_unfinished -= 1
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)

    async def _run(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | BeamSearchParams,
        *,
        priority: int,
        stream: bool,
    ) -> AsyncGenerator[RequestOutput, None]:
        is_search = isinstance(sampling_params, BeamSearchParams)
        named = {"request_id": uuid.uuid4().hex, "priority": priority}
        self.names.note(named["request_id"])
        if is_search:
            outputs = self._engine.beam_search(prompt, sampling_params, **named)
        else:
            outputs = self._engine.generate(prompt, sampling_params, stream=stream, **named)
        timer = self._metrics.start_request(
            is_stream=stream and not is_search, params=sampling_params
        )
        # Who comes while there is no engine is refused: nothing has begun that could end.
        clock = timer if self._engine.is_alive else nullcontext()
        try:
            with clock:
                async with aclosing(outputs):
                    async for output in outputs:
                        timer.observe(output)
                        for completion in output.outputs:
                            if completion.finish_reason == "error":
                                raise _error(output.request_id, completion, sampling_params)
                        yield output
        finally:
            self._metrics.note_engine(self._engine.latest_stats)


def _error(
    request_id: str,
    completion: CompletionOutput,
    sampling_params: SamplingParams | BeamSearchParams,
) -> PaxkvError:
    """What the engine says itself of an end is the request's fault, such as its grammar's."""
    if isinstance(completion.stop_reason, str):
        form = None
        if isinstance(sampling_params, SamplingParams):
            form = sampling_params.structured_outputs
        param = "structured_outputs" if form is None else form.field_of().name
        return InvalidRequestError(completion.stop_reason, param=param)
    return InvariantError(f"the engine failed at request {request_id}")


async def _pump(
    prompt_idx: int,
    outputs: AsyncGenerator[RequestOutput, None],
    queue: asyncio.Queue[tuple[int, RequestOutput | _Ended]],
) -> None:
    ended = _Ended()
    try:
        async with aclosing(outputs):
            async for output in outputs:
                await queue.put((prompt_idx, output))
    except Exception as error:
        ended = _Ended(error)
    await queue.put((prompt_idx, ended))
