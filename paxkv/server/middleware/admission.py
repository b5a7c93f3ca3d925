"""Who is let in: a bound on requests that wait, kept where nothing can come between."""

import contextlib
from collections.abc import Iterator

from paxkv.config.sampling_params import BeamSearchParams, SamplingParams
from paxkv.errors import InvalidRequestError
from paxkv.server.engine_protocol import EngineClient
from paxkv.server.protocol.error_response import OverloadedError


class Admission:
    """Counts the requests that the engine was given and has not finished, and bounds them.

    A request is one completion of one prompt, as the engine counts them. It waits when it has no
    place in the running batch: places are `max_num_seqs`, or, while the engine says that some wait
    (for KV memory, or for the token budget), as many as it runs. One whose grammar is being
    compiled, here or there, is counted like any other, but does not make the engine full. The count
    is this process' own, and changes with the decision, before anything else can run: so that a
    thousand requests that come at once are as many as a thousand that come one by one. What the
    engine says, which may be a step old, changes the number of places alone.

    Args:
        max_waiting_requests: None is no bound.
        max_num_queued_reqs: Bound on running and waiting requests together; None is none.
    """

    def __init__(
        self,
        engine: EngineClient,
        max_waiting_requests: int | None = None,
        max_num_queued_reqs: int | None = None,
    ) -> None:
        self._engine = engine
        self._max_num_queued_reqs = max_num_queued_reqs
        self._max_waiting_requests = max_waiting_requests
        self._num_requests = 0
        self._num_calls = 0

    @property
    def num_requests(self) -> int:
        """Requests that were let in and have not ended."""
        return self._num_requests

    @property
    def num_calls(self) -> int:
        """Calls of clients that these belong to."""
        return self._num_calls

    def has_room(self, num_requests: int) -> bool:
        """Whether so many more may come in now.

        Raises:
            InvalidRequestError: They never could, all at once.
        """
        most = self._max_num_queued_reqs
        if most is not None:
            _check_may_ever_come_in(num_requests, most)
        most_waiting = self._max_waiting_requests
        if most_waiting is None:
            return most is None or self._num_requests + num_requests <= most
        max_num_seqs = self._engine.model_info.max_num_seqs
        _check_may_ever_come_in(num_requests, max_num_seqs + most_waiting)
        if most is not None and self._num_requests + num_requests > most:
            return False
        stats = self._engine.latest_stats
        # With nobody let in, what the engine said last is about those who have left.
        num_waiting_for_room = stats.num_waiting_reqs - stats.num_compiling_reqs
        is_full = self._num_requests > 0 and num_waiting_for_room > 0
        num_places = stats.num_running_reqs if is_full else max_num_seqs
        return self._num_requests + num_requests <= num_places + most_waiting

    @contextlib.contextmanager
    def place_for(self, num_requests: int) -> Iterator[None]:
        """Holds so many places until its end; `has_room` was asked, and nothing awaited since."""
        self._num_requests += num_requests
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_requests -= num_requests
            self._num_calls -= 1

    def refusal(self) -> OverloadedError:
        """What a request is told that finds no room."""
        return OverloadedError(
            f"the server is full: {self._num_requests} requests run or wait{self._bounds()}. Try "
            "again later."
        )

    def _bounds(self) -> str:
        most, most_waiting = self._max_num_queued_reqs, self._max_waiting_requests
        text = "" if most is None else f", {most} may run or wait"
        return text if most_waiting is None else f"{text}, of which at most {most_waiting} may wait"


def _check_may_ever_come_in(num_requests: int, most: int) -> None:
    if num_requests > most:
        raise InvalidRequestError(
            f"the request has {num_requests} prompts times completions; this server takes at most "
            f"{most} at once. Send fewer."
        )


def num_engine_requests(num_prompts: int, params: SamplingParams | BeamSearchParams) -> int:
    """Places that a call needs: 2 prompts with n=3 need 6, a beam search one for each beam."""
    return num_prompts * (params.beam_width if isinstance(params, BeamSearchParams) else params.n)
