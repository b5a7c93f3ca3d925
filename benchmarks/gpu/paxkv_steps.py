"""paxkv's compiled steps, driven without its scheduler and engine: decode, prompts, throughput.

Needs no more than models and runner do, so it runs where the engine's packages are missing. Times
are the host's; what the device does beside it is told apart by how steps are queued:

    ahead    one step or burst is started before the one before it is fetched, as the engine does
    single   the same in bursts of one step: each token is brought home at once
    queued   all bursts are started, then all are fetched: the device never waits for the host, so
             its time alone is left
    host     the device has finished before its tokens are fetched: what the host does alone
"""

import concurrent.futures
import itertools
import time
from collections import deque
from collections.abc import Mapping

from benchmarks.gpu.plain_schedule import PlainSchedule, StepLimits
from benchmarks.gpu.sizes import Sizes, equal_workload, throughput_workload
from benchmarks.workloads import Workload
from models import LoadedModel
from paxkv.contracts.executor import StepHandle
from paxkv.runner.model_runner import ModelRunner

Figures = Mapping[str, list[float]]

# Timed in this order, and then again backwards: so all have the same mean context.
_PHASES = ("ahead", "single", "queued")
# The device gets so many times what it took, before the host is timed alone.
_HOST_PATIENCE = 3.0
_NUM_COMPILING = 8


class StepLoop:
    """Starts steps and fetches them, in order."""

    def __init__(self, runner: ModelRunner, schedule: PlainSchedule) -> None:
        self._runner = runner
        self._schedule = schedule
        self._in_flight: deque[StepHandle] = deque()
        self.token_ids: dict[str, list[int]] = {}

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def start(self, max_decode_steps: int = 1) -> bool:
        """Decides and starts a step; False if nothing is left."""
        output = self._schedule.next_step(max_decode_steps)
        if output is None:
            return False
        self._in_flight.append(self._runner.execute_model(output))
        return True

    def fetch(self) -> None:
        """Waits for the oldest step."""
        output = self._in_flight.popleft().sample_tokens()
        for req_id, token_ids in zip(output.req_ids, output.sampled_token_ids, strict=True):
            self.token_ids.setdefault(req_id, []).extend(token_ids)

    def drain(self) -> None:
        while self._in_flight:
            self.fetch()

    def end(self) -> None:
        """Leaves the runner as if there had been no requests."""
        self.drain()
        self._runner.execute_model(self._schedule.end()).sample_tokens()


class PaxkvSteps:
    """Measures one runner.

    Args:
        limits: What the runner was built with.
    """

    def __init__(
        self, runner: ModelRunner, model: LoadedModel, sizes: Sizes, limits: StepLimits
    ) -> None:
        self._runner = runner
        self._sizes = sizes
        self._limits = limits
        self._vocab_size = model.config.vocab_size
        self._names = (f"plain-{number}" for number in itertools.count())
        self._weight_bytes = read_weight_bytes(model)
        self._kv_bytes = runner.memory_plan.token_bytes

    def decode(self, *, num_reqs: int, seed: int) -> tuple[Figures, dict[str, float]]:
        """Steps of so many requests that only decode.

        Returns:
            Figures, and what a step reads.
        """
        sizes = self._sizes
        workload = equal_workload(
            num_reqs,
            sizes.decode_prompt,
            sizes.num_decode_steps + 2,
            vocab_size=self._vocab_size,
            seed=seed,
        )
        compile_s, _ = self._compile(self._schedule(workload, prompts_first=True))
        schedule = self._schedule(workload, prompts_first=True)
        loop = StepLoop(self._runner, schedule)
        self._compute_prompts(loop, schedule)
        for _ in range(sizes.num_bursts):
            loop.start(sizes.max_decode_burst)
            loop.fetch()
        seconds: dict[str, list[float]] = {phase: [] for phase in _PHASES}
        first_tokens = schedule.num_cached_tokens
        for phase in _PHASES:
            seconds[phase].append(self._phase(phase, loop))
        (step_s,) = seconds["ahead"]
        host_burst_s, host_single_s = (
            [self._host_s(loop, num_steps, step_s) for _ in range(num)]
            for num_steps, num in (
                (sizes.max_decode_burst, sizes.num_bursts),
                (1, sizes.num_single_steps),
            )
        )
        for phase in reversed(_PHASES):
            seconds[phase].append(self._phase(phase, loop))
        # Each step attends to its own token too.
        num_tokens_read = (first_tokens + schedule.num_cached_tokens) / 2 + num_reqs / 2
        loop.end()
        triples = list(zip(*(seconds[phase] for phase in _PHASES), strict=True))
        figures = {
            "compile_s": [compile_s],
            "step_ms": _ms(seconds["ahead"]),
            "single_step_ms": _ms(seconds["single"]),
            "device_step_ms": _ms(seconds["queued"]),
            "tokens_per_s": [num_reqs / s for s in seconds["ahead"]],
            "host_ms_per_burst": _ms(host_burst_s),
            "host_ms_per_step": [1e3 * s / sizes.max_decode_burst for s in host_burst_s],
            "host_ms_per_single_step": _ms(host_single_s),
            "device_idle_percent": [100 * (1 - queued / ahead) for ahead, _, queued in triples],
            "device_idle_single_percent": [
                100 * (1 - queued / single) for _, single, queued in triples
            ],
        }
        reads = {
            "weight_bytes": float(self._weight_bytes),
            "kv_bytes": num_tokens_read * self._kv_bytes,
            "context_tokens": num_tokens_read / num_reqs,
        }
        return figures, reads

    def first_token(self, *, prompt_len: int, seed: int) -> Figures:
        """One prompt on an idle device, until its first token is home."""
        seconds = []
        for repetition in range(self._sizes.num_repetitions + 1):
            workload = equal_workload(
                1, prompt_len, 1, vocab_size=self._vocab_size, seed=seed + repetition
            )
            schedule = self._schedule(workload)
            loop = StepLoop(self._runner, schedule)
            start_s = time.perf_counter()
            while loop.start():
                pass
            loop.drain()
            seconds.append(time.perf_counter() - start_s)
            loop.end()
        return {"ttft_ms": _ms(seconds[1:])}  # the first compiles

    def compile_throughput(self, *, seed: int) -> Figures:
        """Compiles what `throughput` asks for."""
        workload = throughput_workload(self._sizes, vocab_size=self._vocab_size, seed=seed)
        compile_s, num_programs = self._compile(self._schedule(workload))
        return {"compile_s": [compile_s], "num_programs": [float(num_programs)]}

    def throughput(self, *, seed: int) -> Figures:
        """The workload of all lengths, under this benchmark's own schedule."""
        workload = throughput_workload(self._sizes, vocab_size=self._vocab_size, seed=seed)
        rates = []
        for _ in range(2):
            loop = StepLoop(self._runner, self._schedule(workload))
            start_s = time.perf_counter()
            self._run_ahead(loop)
            rates.append(workload.num_output_tokens / (time.perf_counter() - start_s))
            loop.end()
            check_lengths(workload, list(loop.token_ids.values()))
        return {"tokens_per_s": rates}

    def _schedule(self, workload: Workload, *, prompts_first: bool = False) -> PlainSchedule:
        return PlainSchedule(
            workload, self._limits, name=next(self._names), prompts_first=prompts_first
        )

    def _compile(self, schedule: PlainSchedule) -> tuple[float, int]:
        """Compiles the programs of a schedule's steps, side by side; seconds, and their number.

        `ModelRunner.warm_up` would compile every program that any traffic can ask for, which takes
        minutes for a model of many layers. So this reaches into the runner for the few.
        """
        start_s = time.perf_counter()
        buckets, programs = self._runner._buckets, self._runner._programs
        shapes = [buckets.sampler_shape]
        while (output := schedule.next_step(self._sizes.max_decode_burst)) is not None:
            num_tokens = output.num_scheduled_tokens.values()
            if output.num_decode_steps > 1 or max(num_tokens) == 1:
                shapes.append(buckets.burst_shape_for(len(num_tokens)))
            else:
                shapes.append(buckets.shape_for(sum(num_tokens)))
        shapes = list(dict.fromkeys(shapes))
        with concurrent.futures.ThreadPoolExecutor(_NUM_COMPILING) as threads:
            list(threads.map(lambda shape: programs.get(shape, self._runner._kv_cache), shapes))
        return time.perf_counter() - start_s, len(shapes)

    def _compute_prompts(self, loop: StepLoop, schedule: PlainSchedule) -> None:
        # All are home before the first decode: a request that drew nothing in the last step must
        # have its token on the host.
        while schedule.has_prompts_left:
            loop.start()
            if loop.num_in_flight > 1:
                loop.fetch()
        loop.drain()

    def _run_ahead(self, loop: StepLoop) -> None:
        while True:
            has_started = loop.start(self._sizes.max_decode_burst)
            if loop.num_in_flight > 1 or (not has_started and loop.num_in_flight):
                loop.fetch()
            elif not has_started:
                return

    def _phase(self, phase: str, loop: StepLoop) -> float:
        """Seconds of a step, with nothing in flight before and after."""
        sizes = self._sizes
        num_steps = 1 if phase == "single" else sizes.max_decode_burst
        num_starts = sizes.num_single_steps if phase == "single" else sizes.num_bursts
        start_s = time.perf_counter()
        for _ in range(num_starts):
            loop.start(num_steps)
            if phase != "queued" and loop.num_in_flight > 1:
                loop.fetch()
        loop.drain()
        return (time.perf_counter() - start_s) / (num_starts * num_steps)

    def _host_s(self, loop: StepLoop, num_steps: int, step_s: float) -> float:
        """Seconds of the host for a burst, without what it waits for the device."""
        start_s = time.perf_counter()
        loop.start(num_steps)
        host_s = time.perf_counter() - start_s
        time.sleep(_HOST_PATIENCE * num_steps * step_s)
        start_s = time.perf_counter()
        loop.drain()
        return host_s + time.perf_counter() - start_s


def read_weight_bytes(model: LoadedModel) -> int:
    """Bytes of weights that a step reads: all but an embedding table that is not the head too.

    Of that, a step reads a row a token.
    """
    has_head = any(name.startswith("lm_head") for name in model.param_names)
    return sum(
        param.nbytes
        for name, param in zip(model.param_names, model.params, strict=True)
        if not (has_head and name.startswith("embed_tokens"))
    )


def check_lengths(workload: Workload, token_ids: list[list[int]]) -> None:
    """Every request got all its tokens.

    Raises:
        ValueError: One did not.
    """
    wanted = sorted(request.num_output_tokens for request in workload.requests)
    got = sorted(map(len, token_ids))
    if got != wanted:
        raise ValueError(f"output lengths are wrong: got {got}, wanted {wanted}.")


def _ms(seconds: list[float]) -> list[float]:
    return [1e3 * s for s in seconds]
