"""`OutputStream`: where the outputs of one caller's request wait for their reader."""

import asyncio
import dataclasses

from paxkv.contracts.request_output import CompletionOutput, RequestOutput
from paxkv.errors import PaxkvError


class OutputStream:
    """Where the outputs of one caller's request go.

    Args:
        engine_request_id: Its id in the engine, and the end of its requests' ids there.
    """

    def __init__(self, request_id: str, *, engine_request_id: str) -> None:
        self.request_id = request_id
        self.engine_request_id = engine_request_id
        self.queue: asyncio.Queue[RequestOutput | PaxkvError] = asyncio.Queue()
        # What the output processor follows for it.
        self.unfinished_ids: list[str] = []
        self.is_aborted = False
        self._error: PaxkvError | None = None

    async def take(self) -> RequestOutput:
        """The next output.

        Raises:
            EngineDeadError: The engine ended instead.
            InvariantError: Its outputs cannot be made.
        """
        if self._error is not None:
            raise self._error
        output = await self.queue.get()
        if isinstance(output, PaxkvError):
            raise output
        return output

    async def take_all(self) -> RequestOutput:
        """The outputs that are there, as one; the next one, where none is.

        Raises:
            PaxkvError: As `take`, and what came before it has been taken.
        """
        output = await self.take()
        while not self.queue.empty():
            more = self.queue.get_nowait()
            if isinstance(more, PaxkvError):
                self._error = more
                break
            output = _merge_deltas(output, more)
        return output


def _merge_deltas(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Two outputs of one stream that came one behind the other, as one."""
    by_index = {completion.index: completion for completion in first.outputs}
    for later in second.outputs:
        earlier = by_index.get(later.index)
        by_index[later.index] = later if earlier is None else _merge_completions(earlier, later)
    return dataclasses.replace(
        second,
        outputs=[by_index[index] for index in sorted(by_index)],
        # A stream has them once, with its first tokens.
        prompt_logprobs=(
            second.prompt_logprobs if first.prompt_logprobs is None else first.prompt_logprobs
        ),
    )


def _merge_completions(earlier: CompletionOutput, later: CompletionOutput) -> CompletionOutput:
    logprobs = later.logprobs
    if earlier.logprobs is not None:
        logprobs = [*earlier.logprobs, *(logprobs or ())]
    return dataclasses.replace(
        later,
        text=earlier.text + later.text,
        token_ids=[*earlier.token_ids, *later.token_ids],
        logprobs=logprobs,
    )
