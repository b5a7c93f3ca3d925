"""`Generator`: runs the prompts of one HTTP request concurrently in the engine."""

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
    """Marks the end of a prompt's outputs; `error` is set if the prompt failed."""

    error: Exception | None = None


class Generator:
    """Sends prompts to the engine, and records metrics of their outputs."""

    def __init__(
        self, engine: EngineClient, metrics: ServerMetrics, admission: Admission | None = None
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._admission = Admission(engine) if admission is None else admission
        metrics.record_engine(engine.latest_stats)
        self.names = RequestNames()

    def check_room(self, num_requests: int) -> None:
        """Checks that `generate` would accept this many requests now.

        Raises:
            OverloadedError: Too many requests run or wait.
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
        """Yields outputs of all prompts. If one fails or the iterator is closed, all are aborted.

        Args:
            stream: Has no effect on a beam search, which yields one output at the end.

        Raises:
            OverloadedError: Too many requests run or wait. Raised before the first output. If the
                request itself is not valid, that error is raised instead.
        """
        num_requests = num_engine_requests(len(prompts), sampling_params)
        if not self._admission.has_room(num_requests):
            for prompt in prompts:
                await self._engine.check(prompt, sampling_params)
            raise self._admission.refusal()
        with self._admission.admit(num_requests):
            runs = [
                self._run(prompt, sampling_params, priority=priority, stream=stream)
                for prompt in prompts
            ]
            if len(runs) == 1:
                async with aclosing(runs[0]) as outputs:
                    async for output in outputs:
                        yield 0, output
                return
            # One slot per prompt, so that each can put one output without waiting.
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
        self.names.record(named["request_id"])
        if is_search:
            outputs = self._engine.beam_search(prompt, sampling_params, **named)
        else:
            outputs = self._engine.generate(prompt, sampling_params, stream=stream, **named)
        timer = self._metrics.start_request(
            is_stream=stream and not is_search, params=sampling_params
        )
        # Without a live engine the request is rejected, and must not count as one that ended.
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
            self._metrics.record_engine(self._engine.latest_stats)


def _error(
    request_id: str,
    completion: CompletionOutput,
    sampling_params: SamplingParams | BeamSearchParams,
) -> PaxkvError:
    """The error of a failed completion. The request is at fault if the engine gives a reason."""
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
