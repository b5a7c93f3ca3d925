"""Prometheus metrics under vLLM's names, so that its dashboards work here."""

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

from paxkv.contracts.engine_output import SchedulerStats
from paxkv.contracts.request_output import CompletionOutput, CompletionTimes, RequestOutput
from paxkv.errors import InvalidRequestError
from paxkv.sampling_params import BeamSearchParams, SamplingParams
from paxkv.server.engine_metrics import ENGINE_NUMBER, LABELS, EngineCollector
from paxkv.server.http_metrics import HttpMetrics

# Upper bounds of buckets: vLLM's, as dashboards add up servers of both.
_FIRST_TOKEN_BUCKETS_S = (
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0)
    + (7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
)  # fmt: skip
_TOKEN_BUCKETS_S = (
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
    + (7.5, 10.0, 20.0, 40.0, 80.0)
)  # fmt: skip
_REQUEST_BUCKETS_S = (
    (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
    + (120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
)  # fmt: skip
_N_BUCKETS = (1, 2, 5, 10, 20)
_FINISH_REASONS = ("stop", "length", "abort", "error")
_DEFAULT_MAX_MODEL_LEN = 2**17


class ServerMetrics:
    """Counts what passes through the server, and shows the engine's own counts beside it.

    Args:
        max_model_len: Bounds the buckets of token counts.
        cache_settings: Labels of `vllm:cache_config_info`; no such metric without.
    """

    def __init__(
        self,
        model_name: str,
        *,
        max_model_len: int = _DEFAULT_MAX_MODEL_LEN,
        cache_settings: Mapping[str, str] | None = None,
    ) -> None:
        self._label_values = (model_name, ENGINE_NUMBER)
        # A registry of its own: two servers in one process must not add up.
        self._registry = CollectorRegistry()
        self._engine = EngineCollector(model_name)
        self._registry.register(self._engine)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self.http = HttpMetrics(self._registry)
        self._make_counters()
        self._make_time_histograms()
        self._make_token_histograms(build_1_2_5_buckets(max_model_len))
        if cache_settings is not None:
            info = Gauge(
                "vllm:cache_config_info",
                "settings of the KV cache, as labels",
                ("engine", *cache_settings),
                registry=self._registry,
            )
            info.labels(ENGINE_NUMBER, *cache_settings.values()).set(1)

    def render(self, stats: SchedulerStats) -> bytes:
        """Everything in Prometheus' text format, with `stats` as the engine's part."""
        self._engine.update(stats)
        return generate_latest(self._registry)

    def note_engine(self, stats: SchedulerStats) -> None:
        """What is known of the engine now; between two scrapes it may end, and another begin."""
        self._engine.note(stats)

    def start_request(
        self, *, is_stream: bool, params: SamplingParams | BeamSearchParams | None = None
    ) -> "RequestTimer":
        """Starts the clock of one prompt."""
        return RequestTimer(self, is_stream=is_stream, params=params)

    def count_new_tokens(self, num_tokens: int) -> None:
        self._generation_tokens.inc(num_tokens)

    def observe_first_token(self, seconds: float) -> None:
        self._time_to_first_token.observe(seconds)

    def observe_tokens(self, num_tokens: int, seconds_per_token: float) -> None:
        for _ in range(num_tokens):
            self._inter_token_latency.observe(seconds_per_token)

    def observe_prompt(self, output: RequestOutput) -> None:
        """Counts the prompt of a finished request."""
        num_tokens = len(output.prompt_token_ids)
        # A counter that is made smaller raises, and no number is worth a request.
        num_cached = min(output.num_cached_tokens, num_tokens)
        num_computed = num_tokens - num_cached
        self._prompt_tokens.inc(num_tokens)
        self._prompt_tokens_cached.inc(num_cached)
        self._prompt_tokens_by_source["local_compute"].inc(num_computed)
        self._prompt_tokens_by_source["local_cache_hit"].inc(num_cached)
        self._request_prompt_tokens.observe(num_tokens)
        self._computed_tokens.observe(num_computed)

    def observe_params(self, params: SamplingParams | BeamSearchParams) -> None:
        """Counts what a finished request asked for."""
        num_completions = params.beam_width if isinstance(params, BeamSearchParams) else params.n
        self._params_n.observe(num_completions)
        if params.max_tokens is not None:
            self._params_max_tokens.observe(params.max_tokens)

    def observe_finish(self, reason: str, seconds: float) -> None:
        """Counts a completion that ended, after so long."""
        self._request_success[reason].inc()
        self._e2e_latency.observe(seconds)

    def observe_completion(self, num_tokens: int, times: CompletionTimes | None) -> None:
        """Counts the tokens of a finished completion, and where its time went."""
        self._request_generation_tokens.observe(num_tokens)
        if times is None:
            return
        self._queue_time.observe(times.queue_s)
        self._prefill_time.observe(times.prefill_s)
        self._decode_time.observe(times.decode_s)
        self._inference_time.observe(times.prefill_s + times.decode_s)
        if num_tokens > 1:
            self._time_per_token.observe(times.decode_s / (num_tokens - 1))

    def observe_longest(self, num_tokens: int) -> None:
        """Counts the longest completion of a finished request."""
        self._longest_generation.observe(num_tokens)

    def _make_counters(self) -> None:
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "prompt tokens")
        self._prompt_tokens_cached = self._counter(
            "vllm:prompt_tokens_cached", "prompt tokens that came from the prefix cache"
        )
        self._prompt_tokens_by_source = self._counters(
            "vllm:prompt_tokens_by_source",
            "prompt tokens, computed or from the prefix cache",
            "source",
            ("local_compute", "local_cache_hit"),
        )
        self._generation_tokens = self._counter("vllm:generation_tokens", "tokens drawn")
        self._request_success = self._counters(
            "vllm:request_success", "completions that ended", "finished_reason", _FINISH_REASONS
        )

    def _make_time_histograms(self) -> None:
        self._time_to_first_token = self._histogram(
            "vllm:time_to_first_token_seconds",
            "from arrival to the first token",
            _FIRST_TOKEN_BUCKETS_S,
        )
        self._inter_token_latency = self._histogram(
            "vllm:inter_token_latency_seconds", "between two tokens of a stream", _TOKEN_BUCKETS_S
        )
        self._time_per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "mean time of a completion's tokens after the first",
            _TOKEN_BUCKETS_S,
        )
        self._e2e_latency, self._queue_time, self._inference_time = (
            self._histogram(f"vllm:{name}_seconds", help_text, _REQUEST_BUCKETS_S)
            for name, help_text in (
                ("e2e_request_latency", "from arrival to the last token"),
                ("request_queue_time", "from arrival in the engine to the first step"),
                ("request_inference_time", "from the first step to the last token"),
            )
        )
        self._prefill_time, self._decode_time = (
            self._histogram(f"vllm:{name}_seconds", help_text, _REQUEST_BUCKETS_S)
            for name, help_text in (
                ("request_prefill_time", "from the first step to the first token"),
                ("request_decode_time", "from the first token to the last"),
            )
        )

    def _make_token_histograms(self, buckets: Sequence[int]) -> None:
        self._request_prompt_tokens = self._histogram(
            "vllm:request_prompt_tokens", "prompt tokens of a request", buckets
        )
        self._computed_tokens = self._histogram(
            "vllm:request_prefill_kv_computed_tokens",
            "prompt tokens of a request that the prefix cache did not have",
            buckets,
        )
        self._request_generation_tokens = self._histogram(
            "vllm:request_generation_tokens", "tokens of a completion", buckets
        )
        self._longest_generation = self._histogram(
            "vllm:request_max_num_generation_tokens",
            "tokens of a request's longest completion",
            buckets,
        )
        self._params_max_tokens = self._histogram(
            "vllm:request_params_max_tokens", "max_tokens of a request", buckets
        )
        self._params_n = self._histogram(
            "vllm:request_params_n", "completions that a request asks for", _N_BUCKETS
        )

    def _counter(self, name: str, help_text: str) -> Counter:
        counter = Counter(name, help_text, LABELS, registry=self._registry)
        return counter.labels(*self._label_values)

    def _counters(
        self, name: str, help_text: str, label: str, values: Sequence[str]
    ) -> dict[str, Counter]:
        """One for each value of a label: all are there, with 0, from the start."""
        counter = Counter(name, help_text, (*LABELS, label), registry=self._registry)
        return {value: counter.labels(*self._label_values, value) for value in values}

    def _histogram(self, name: str, help_text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(name, help_text, LABELS, buckets=buckets, registry=self._registry)
        return histogram.labels(*self._label_values)


class RequestTimer:
    """The clock of one prompt, fed with its outputs; as a context, for as long as it runs.

    Only a stream shows its first token when it is drawn; what comes whole tells at its end when
    that was. A request that is left before its end counts as aborted, or as failed where an error
    other than the caller's ended it.
    """

    def __init__(
        self,
        metrics: ServerMetrics,
        *,
        is_stream: bool,
        params: SamplingParams | BeamSearchParams | None,
    ) -> None:
        self._metrics = metrics
        self._is_stream = is_stream
        self._params = params
        self._start_time = time.perf_counter()
        # Index of a completion -> when its last token came.
        self._last_token_times: dict[int, float] = {}
        # Index of a completion -> its tokens so far.
        self._num_tokens: dict[int, int] = {}
        self._num_ended = 0
        self._is_finished = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _exc_type: type[BaseException] | None,
        exc: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if self._is_finished or isinstance(exc, InvalidRequestError):
            return
        # The engine's error is an `Exception`; that the client left is none.
        reason = "error" if isinstance(exc, Exception) else "abort"
        num_completions = getattr(self._params, "n", 1)
        for _ in range(num_completions - self._num_ended):
            self._metrics.observe_finish(reason, time.perf_counter() - self._start_time)

    def observe(self, output: RequestOutput) -> None:
        """Counts one output; the finished one ends the clock."""
        now = time.perf_counter()
        for completion in output.outputs:
            self._observe_completion(completion, now)
        if output.finished:
            self._is_finished = True
            self._metrics.observe_prompt(output)
            self._metrics.observe_longest(max(self._num_tokens.values(), default=0))
            if self._params is not None:
                self._metrics.observe_params(self._params)

    def _observe_completion(self, completion: CompletionOutput, now: float) -> None:
        index, num_tokens = completion.index, len(completion.token_ids)
        self._metrics.count_new_tokens(num_tokens)
        if num_tokens and self._is_stream:
            self._observe_tokens(index, num_tokens, now)
        num_tokens += self._num_tokens.get(index, 0)
        self._num_tokens[index] = num_tokens
        if completion.finish_reason is None:
            return
        self._num_ended += 1
        self._metrics.observe_finish(completion.finish_reason, now - self._start_time)
        self._metrics.observe_completion(num_tokens, completion.times)
        if not self._is_stream and index == 0 and completion.times is not None:
            self._metrics.observe_first_token(completion.times.first_token_s)

    def _observe_tokens(self, index: int, num_tokens: int, now: float) -> None:
        if not self._last_token_times:
            self._metrics.observe_first_token(now - self._start_time)
        elif index in self._last_token_times:
            # Several tokens at once took as long as they took, each its share.
            seconds = (now - self._last_token_times[index]) / num_tokens
            self._metrics.observe_tokens(num_tokens, seconds)
        self._last_token_times[index] = now


def build_1_2_5_buckets(most: int) -> list[int]:
    """1, 2, 5, 10, 20, 50 and so on up to `most`: 300 -> [1, 2, 5, 10, 20, 50, 100, 200]."""
    buckets, power = [], 1
    while power <= most:
        buckets += [power * digit for digit in (1, 2, 5) if power * digit <= most]
        power *= 10
    return buckets
