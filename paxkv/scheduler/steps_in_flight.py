"""StepsInFlight: steps that were scheduled and have not returned their tokens."""

from collections import deque

from paxkv.contracts.scheduler_output import SchedulerOutput
from paxkv.errors import InvariantError
from paxkv.scheduler.request import Request


class StepsInFlight:
    """The requests of each step in flight, oldest step first; empty steps are omitted."""

    def __init__(self) -> None:
        self._steps: deque[tuple[SchedulerOutput, dict[str, Request]]] = deque()

    def add(self, output: SchedulerOutput, requests: dict[str, Request]) -> None:
        if requests:
            self._steps.append((output, requests))

    def get_requests(self, output: SchedulerOutput) -> dict[str, Request]:
        """Requests of the step, by id, without those discarded since it was scheduled.

        Raises:
            InvariantError: The step is not the oldest step in flight.
        """
        if not output.num_scheduled_tokens:
            return {}
        if not self._steps or self._steps[0][0] is not output:
            raise InvariantError(
                "tokens arrived for a step that is not the oldest of the "
                f"{len(self._steps)} in flight. Steps must return in the order of `schedule`."
            )
        return self._steps[0][1]

    def remove(self, output: SchedulerOutput) -> None:
        """Removes a step that has returned."""
        if self._steps and self._steps[0][0] is output:
            self._steps.popleft()

    def discard(self, request: Request) -> None:
        """Drops the tokens that steps in flight will return for the request."""
        for _, requests in self._steps:
            if requests.get(request.request_id) is request:
                del requests[request.request_id]

    def num_sure_tokens(self, request: Request) -> int:
        """Number of the request's computed tokens that no failed load and no early end can undo.

        Tokens after the start of a load in flight do not count, because the load may fail. (For
        asynchronous loads this cannot happen: the request joins a step only after its load.) For a
        finished request, tokens of a burst in flight do not count either: the device may have
        stopped computing them when the request ended.
        """
        num_tokens = request.num_computed_tokens
        for output, requests in self._steps:
            if requests.get(request.request_id) is not request:
                continue
            if output.num_decode_steps > 1 and request.is_finished:
                num_tokens = min(num_tokens, request.num_tokens - 1)
            metadata = output.kv_connector_metadata
            if metadata is not None:
                for load in metadata.loads:
                    if load.request_id == request.request_id:
                        num_tokens = min(num_tokens, load.start_token_idx)
        return num_tokens

    def count_unknown_tokens(self) -> dict[str, int]:
        """Number of tokens, by request id, that steps in flight compute and the host has not seen.

        These are drafts that are being verified, and tokens that a burst samples and computes
        itself. Tokens of bursts do not count if the request has placeholders for them.
        """
        counts: dict[str, int] = {}
        for output, requests in self._steps:
            if output.num_decode_steps > 1:
                for req_id, request in requests.items():
                    if request.num_output_placeholders == 0:
                        counts[req_id] = output.num_scheduled_tokens[req_id] - 1
            for req_id, token_ids in output.scheduled_spec_decode_tokens.items():
                if req_id in requests:
                    counts[req_id] = counts.get(req_id, 0) + len(token_ids)
        return counts

    def __len__(self) -> int:
        return len(self._steps)
