"""`StepMeter`: measures times and tokens of an engine's steps for the inspector."""

from collections.abc import Container, Sequence
from operator import attrgetter

from paxkv.contracts.engine_output import EngineCoreOutput

# Maximum number of times to first token per frame; the page's curve needs no more.
MAX_TTFTS = 64
_new_token_ids = attrgetter("new_token_ids")


class StepMeter:
    """Counts steps, output tokens and times, which the scheduler does not count.

    Attributes:
        host_s: Seconds in which the host worked on steps.
        device_s: Seconds in which the host waited for the device.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_output_tokens = 0
        self.host_s = 0.0
        self.device_s = 0.0
        # Arrival times of requests without a first token, in seconds since the epoch.
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
        """Records that a step has ended.

        Args:
            took_s: Duration of the step, including `wait_s`.
            wait_s: Time in which the host only waited for the device.
            now_s: Seconds since the epoch.
            is_one_token_each: Each output has one token; saves counting the tokens of hundreds of
                outputs.
            is_empty: The step computed nothing and only reported finished requests to the runner.
                Its time counts, but it does not count as a step.
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

    def pop_ttfts(self, unfinished: Container[str]) -> list[float]:
        """Returns the times to first token since the last call; drops requests that ended."""
        ttft_s, self._ttft_s = self._ttft_s, []
        self._arrival_times = {
            req_id: at_s for req_id, at_s in self._arrival_times.items() if req_id in unfinished
        }
        return ttft_s
