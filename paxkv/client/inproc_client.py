"""`InprocClient`: a synchronous client of an engine core, for one calling thread."""

from collections.abc import Sequence

from paxkv.client.output_processor import OutputKind, OutputProcessor
from paxkv.contracts.engine_output import EngineDead, EngineOutput, StepOutputs, UtilityReply
from paxkv.contracts.engine_request import AbortRequests, AddRequest, EngineRequest, UtilityCall
from paxkv.contracts.owner_process import OwnerProcess
from paxkv.contracts.request_output import RequestOutput
from paxkv.contracts.wire import EngineTransport
from paxkv.errors import EngineDeadError, PaxkvError


class InprocClient:
    """Sends requests and waits for their outputs.

    Every method raises EngineDeadError once the engine has ended, and ForkedProcessError in a fork
    of the process that created the client.
    """

    def __init__(self, transport: EngineTransport, output_processor: OutputProcessor) -> None:
        self._owner = OwnerProcess("this client")
        self._transport = transport
        self._output_processor = output_processor
        self._next_call_id = 0
        # Outputs that arrived but were not returned yet, for example during a control call.
        self._request_outputs: list[RequestOutput] = []
        # Caller's request id -> the engine's ids. Removed when the last output is returned.
        self._engine_ids: dict[str, list[str]] = {}

    @property
    def num_unfinished_requests(self) -> int:
        return self._output_processor.num_unfinished_requests

    def add_request(
        self,
        request: EngineRequest,
        *,
        prompt: str | None = None,
        output_kind: OutputKind = "final_only",
    ) -> None:
        """Sends the engine a request, which `InputProcessor` made."""
        self._owner.check()
        children = self._output_processor.add_request(
            request, prompt=prompt, output_kind=output_kind
        )
        self._engine_ids[request.request_id] = [child.request_id for child in children]
        for child in children:
            self._transport.send(AddRequest(request=child))

    def wait_for_outputs(self) -> list[RequestOutput]:
        """Waits for the engine's next message; returns its outputs, which may be none.

        Raises:
            EngineDeadError: The engine has ended. If it was one of several engines, its requests
                have ended, and the caller can continue to wait for the others.
        """
        self._owner.check()
        if not self._request_outputs:
            self._handle_message(self._transport.receive())
        request_outputs, self._request_outputs = self._request_outputs, []
        for output in request_outputs:
            if output.finished:
                self._engine_ids.pop(output.request_id, None)
        return request_outputs

    def abort(self, request_ids: Sequence[str]) -> list[RequestOutput]:
        """Ends requests, releases their kept blocks, and returns their last outputs.

        Ignores unknown ids.
        """
        self._owner.check()
        request_outputs = self._output_processor.abort(request_ids).request_outputs
        # If the caller was interrupted, outputs may remain here, and aborts after a stop string may
        # be unsent. So drop the outputs, and abort requests that the output processor has ended.
        self._request_outputs = [
            o for o in self._request_outputs if o.request_id not in request_ids
        ]
        engine_ids = [e for i in request_ids for e in self._engine_ids.pop(i, [i])]
        if engine_ids:
            self._transport.send(AbortRequests(request_ids=engine_ids))
        return request_outputs

    def call(self, method: str, *arguments: str | int | bool) -> str:
        """Calls a control method of the engine core and returns its result as JSON.

        Raises:
            PaxkvError: The method failed in the engine.
        """
        self._owner.check()
        call_id, self._next_call_id = self._next_call_id, self._next_call_id + 1
        self._transport.send(UtilityCall(call_id=call_id, method=method, arguments=arguments))
        while True:
            reply = self._handle_message(self._transport.receive())
            # Skip replies to earlier calls whose caller was interrupted.
            if reply is None or reply.call_id != call_id:
                continue
            if reply.error is not None:
                raise PaxkvError(f"{method} failed in the engine: {reply.error}")
            return reply.result_json

    def close(self) -> None:
        """Ends the engine. Does nothing in a fork of the process that created the client."""
        if self._owner.is_current:
            self._transport.close()

    def _handle_message(self, message: EngineOutput | None) -> UtilityReply | None:
        """Stores the outputs of a step; returns the message if it is a `UtilityReply`."""
        if isinstance(message, EngineDead) and message.request_ids is None:
            raise EngineDeadError(f"the engine has ended: {message.reason}")
        if isinstance(message, StepOutputs | EngineDead):
            processed = (
                self._output_processor.process(message)
                if isinstance(message, StepOutputs)
                else self._output_processor.end_with_engine(message)
            )
            self._request_outputs += processed.request_outputs
            if processed.request_ids_to_abort:
                self._transport.send(AbortRequests(request_ids=processed.request_ids_to_abort))
            for error in processed.errors.values():
                raise error
        return message if isinstance(message, UtilityReply) else None
