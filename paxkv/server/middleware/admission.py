"""`Admission`: limits how many requests run or wait in the engine."""

import contextlib
from collections.abc import Iterator

from paxkv.config.sampling_params import BeamSearchParams, SamplingParams
from paxkv.errors import InvalidRequestError
from paxkv.server.engine_protocol import EngineClient
from paxkv.server.protocol.error_response import OverloadedError


class Admission:
    """Counts the requests that the engine has not finished, and limits them.

    A request is one completion of one prompt, as in the engine. It waits if the running batch has
    no place for it. The batch has `max_num_seqs` places. While requests wait in the engine for KV
    memory or for the token budget, it has only as many places as requests run. A request whose
    grammar is being compiled counts like any other, but does not make the batch full.

    This class counts requests itself, in the same moment in which it admits them. So a thousand
    requests that arrive at once count like a thousand that arrive one by one. The engine's counts,
    which may be a step old, only determine the number of places.

    Args:
        max_waiting_requests: Limit on waiting requests; None is no limit.
        max_num_queued_reqs: Limit on running and waiting requests together; None is no limit.
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
        """Admitted requests that have not ended."""
        return self._num_requests

    @property
    def num_calls(self) -> int:
        """Calls of clients that these requests belong to."""
        return self._num_calls

    def has_room(self, num_requests: int) -> bool:
        """Whether this many more requests may be admitted now.

        Raises:
            InvalidRequestError: They exceed a limit even if no other request runs or waits.
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
        # If no request is admitted, the engine's latest counts are about requests that have ended.
        num_waiting_for_room = stats.num_waiting_reqs - stats.num_compiling_reqs
        is_full = self._num_requests > 0 and num_waiting_for_room > 0
        num_places = stats.num_running_reqs if is_full else max_num_seqs
        return self._num_requests + num_requests <= num_places + most_waiting

    @contextlib.contextmanager
    def admit(self, num_requests: int) -> Iterator[None]:
        """Counts requests until the context ends. No `await` may separate it from `has_room`."""
        self._num_requests += num_requests
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_requests -= num_requests
            self._num_calls -= 1

    def refusal(self) -> OverloadedError:
        """The error for a request that is not admitted."""
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
            f"the request asks for {num_requests} completions of all its prompts together; this "
            f"server accepts at most {most} at once. Send fewer prompts, or a smaller n."
        )


def num_engine_requests(num_prompts: int, params: SamplingParams | BeamSearchParams) -> int:
    """The requests of one call: 2 prompts with n=3 are 6; a beam search has one for each beam."""
    return num_prompts * (params.beam_width if isinstance(params, BeamSearchParams) else params.n)
