"""StepsInFlight: steps that were scheduled and whose tokens have not come back."""

from collections import deque

from paxkv.contracts.scheduler_output import SchedulerOutput
from paxkv.errors import InvariantError
from paxkv.scheduler.request import Request


class StepsInFlight:
    """The requests of each step, oldest step in front. Steps without requests are left out."""

    def __init__(self) -> None:
        self._steps: deque[tuple[SchedulerOutput, dict[str, Request]]] = deque()

    def add(self, output: SchedulerOutput, requests: dict[str, Request]) -> None:
        if requests:
            self._steps.append((output, requests))

    def get_requests(self, output: SchedulerOutput) -> dict[str, Request]:
        """Requests whose tokens `output` is to bring, by id: not those discarded since.

        Raises:
            InvariantError: The oldest step in flight is another one.
        """
        if not output.num_scheduled_tokens:
            return {}
        if not self._steps or self._steps[0][0] is not output:
            raise InvariantError(
                "tokens came for a step that is not the oldest of the "
                f"{len(self._steps)} in flight."
            )
        return self._steps[0][1]

    def remove(self, output: SchedulerOutput) -> None:
        """The step is done."""
        if self._steps and self._steps[0][0] is output:
            self._steps.popleft()

    def discard(self, request: Request) -> None:
        """Whatever comes for the request from steps in flight is not wanted any more."""
        for _, requests in self._steps:
            if requests.get(request.request_id) is request:
                del requests[request.request_id]

    def num_sure_tokens(self, request: Request) -> int:
        """Its computed tokens but those from a load on that is in flight and may fail yet.

        A load beside other steps does not count: the request is in no step before it has ended.
        When it has finished, what a burst in flight was to compute does not count either: the
        device may know of the end.
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
        """Tokens that are computed before anyone here knows them, per request that waits for them.

        Drafts being verified, and what bursts compute of their own; not where there are
        placeholders for these.
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
