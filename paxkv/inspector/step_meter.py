"""StepMeter: times and tokens of an engine's steps, while somebody looks."""

from collections.abc import Container, Sequence
from operator import attrgetter

from paxkv.contracts.engine_output import EngineCoreOutput

# More are not told apart on a curve.
MAX_TTFTS = 64
_new_token_ids = attrgetter("new_token_ids")


class StepMeter:
    """Counts what the scheduler does not count itself.

    Attributes:
        host_s: Seconds in which the host worked on steps; `device_s` is those in which it waited.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_output_tokens = 0
        self.host_s = 0.0
        self.device_s = 0.0
        # Requests without a first token -> when they arrived, in seconds since the epoch.
        self._arrival_times: dict[str, float] = {}
        self._ttft_s: list[float] = []

    def on_arrival(self, request_id: str, arrival_time: float) -> None:
        self._arrival_times[request_id] = arrival_time

    def on_step(
        self,
        outputs: Sequence[EngineCoreOutput],
        *,
        took_s: float,
        wait_s: float,
        now_s: float,
        is_one_token_each: bool = False,
        is_empty: bool = False,
    ) -> None:
        """A step came home.

        Args:
            took_s: With `wait_s`, in which the host only waited for the device.
            now_s: Seconds since the epoch.
            is_one_token_each: So that they need not be counted: steps have hundreds of outputs.
            is_empty: It computed nothing, and told the runner alone who has ended. Its time counts
                with that of the others, and it is none of them.
        """
        self.num_steps += 0 if is_empty else 1
        self.host_s += took_s - wait_s
        self.device_s += wait_s
        self.num_output_tokens += (
            len(outputs) if is_one_token_each else sum(map(len, map(_new_token_ids, outputs)))
        )
        if self._arrival_times:
            self._time_first_tokens(outputs, now_s)

    def _time_first_tokens(self, outputs: Sequence[EngineCoreOutput], now_s: float) -> None:
        for output in outputs:
            if not output.new_token_ids:
                continue
            arrival_time = self._arrival_times.pop(output.request_id, None)
            if arrival_time is not None and len(self._ttft_s) < MAX_TTFTS:
                self._ttft_s.append(max(now_s - arrival_time, 0.0))

    def take_ttfts(self, unfinished: Container[str]) -> list[float]:
        """Those since the last call; forgets requests that ended without a token."""
        taken, self._ttft_s = self._ttft_s, []
        self._arrival_times = {
            req_id: at_s for req_id, at_s in self._arrival_times.items() if req_id in unfinished
        }
        return taken
