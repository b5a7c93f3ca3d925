"""`RequestStreams`: the streams of a client's unfinished requests."""

import logging
from collections.abc import Callable, Mapping, Sequence

from paxkv.client.output_processor import OutputKind, OutputProcessor
from paxkv.client.output_stream import MAX_WAITING_BYTES, OutputStream
from paxkv.client.waiting_budget import WaitingBudget
from paxkv.contracts.engine_request import EngineRequest
from paxkv.contracts.request_output import RequestOutput
from paxkv.errors import InvalidRequestError, PaxkvError, SlowReaderError

logger = logging.getLogger(__name__)

_READ_FASTER = "Read the stream faster, ask for fewer completions or logprobs"


class RequestStreams:
    """Delivers the engine's outputs to streams, and ends streams.

    Args:
        abort_in_engine: Aborts requests in the engine, by their ids in the output processor.
        max_waiting_bytes: Limit on the bytes of all answers that wait for slow readers.
    """

    def __init__(
        self,
        output_processor: OutputProcessor,
        *,
        abort_in_engine: Callable[[list[str]], None],
        max_waiting_bytes: int,
    ) -> None:
        self._output_processor = output_processor
        self._abort_in_engine = abort_in_engine
        # By the caller's request id.
        self._streams: dict[str, OutputStream] = {}
        # By request id in the output processor; a beam search has several.
        self._by_engine_id: dict[str, OutputStream] = {}
        self.waiting_budget = WaitingBudget(max_waiting_bytes)
        self._num_opened = 0

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, request_id: str) -> OutputStream:
        """Opens the stream of a caller's request.

        Raises:
            InvalidRequestError: A stream with this id is open.
        """
        if request_id in self._streams:
            raise InvalidRequestError(
                f"request_id {request_id!r} is in use by an unfinished request.",
                param="request_id",
            )
        # Engine ids are never reused: tokens of an aborted request may still arrive after the
        # caller has sent another request with the same id.
        stream = OutputStream(
            request_id,
            engine_request_id=f"{request_id}-{self._num_opened}",
            budget=self.waiting_budget,
        )
        self._num_opened += 1
        self._streams[request_id] = stream
        return stream

    def add_request(
        self,
        stream: OutputStream,
        request: EngineRequest,
        prompt: str | None,
        output_kind: OutputKind,
    ) -> Sequence[EngineRequest]:
        """Adds a request to a stream. Returns the engine requests that it consists of."""
        children = self._output_processor.add_request(
            request, prompt=prompt, output_kind=output_kind
        )
        stream.unfinished_ids.append(request.request_id)
        self._by_engine_id[request.request_id] = stream
        return children

    def close(self, stream: OutputStream) -> None:
        """Removes a stream and aborts its unfinished requests in the engine."""
        stream.free()
        self._streams.pop(stream.request_id, None)
        for engine_id in stream.unfinished_ids:
            self._by_engine_id.pop(engine_id, None)
        processed = self._output_processor.abort(stream.unfinished_ids)
        self._abort_in_engine(processed.request_ids_to_abort)

    def abort(self, request_id: str) -> None:
        """Ends a request with a last output. Ignores unknown and finished ids."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.is_aborted = True
            processed = self._output_processor.abort(stream.unfinished_ids)
            self.deliver(processed.request_outputs)
            self.end_failed(processed.errors)
            self._abort_in_engine(processed.request_ids_to_abort)

    def deliver(self, request_outputs: Sequence[RequestOutput]) -> None:
        """Puts outputs into their streams, and ends requests whose readers are too slow."""
        for output in request_outputs:
            stream = self._by_engine_id.get(output.request_id)
            if stream is None:
                continue
            if output.finished:
                stream.unfinished_ids.remove(output.request_id)
                del self._by_engine_id[output.request_id]
            stream.put(output)
            if stream.is_over_limit:
                self._end_slow(
                    stream,
                    f"more than {MAX_WAITING_BYTES // 2**20} MiB of the answer waited for the "
                    f"client to read. {_READ_FASTER}.",
                )
        budget = self.waiting_budget
        while budget.is_exceeded:
            self._end_slow(
                max(self._streams.values(), key=lambda stream: stream.num_waiting_bytes),
                f"more than {budget.max_bytes} bytes of all answers waited for clients to read, "
                f"and this answer had the most. {_READ_FASTER}, or start the server with a larger "
                "--max-unread-bytes.",
            )

    def end_failed(self, errors: Mapping[str, PaxkvError]) -> None:
        """Ends each request in `errors` with its error; other requests continue."""
        for engine_id, error in errors.items():
            stream = self._by_engine_id.pop(engine_id, None)
            if stream is not None:
                stream.unfinished_ids.remove(engine_id)
                stream.fail(error)

    def fail_all(self, make_error: Callable[[], PaxkvError]) -> None:
        """Ends all streams with unfinished requests, each with a new error."""
        for stream in set(self._by_engine_id.values()):
            stream.fail(make_error())

    def _end_slow(self, stream: OutputStream, reason: str) -> None:
        """Ends a request whose reader is too slow, in the client and in the engine."""
        logger.warning("request %s is ended: %s", stream.request_id, reason)
        stream.drop(SlowReaderError(reason))
        processed = self._output_processor.abort(stream.unfinished_ids)
        self._abort_in_engine(processed.request_ids_to_abort)
        for engine_id in stream.unfinished_ids:
            del self._by_engine_id[engine_id]
        stream.unfinished_ids.clear()
