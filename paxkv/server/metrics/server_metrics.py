"""Prometheus metrics under vLLM's names, so that vLLM's dashboards work with paxkv."""

import time
from collections.abc import Callable, Mapping, Sequence
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

from paxkv.config.sampling_params import BeamSearchParams, SamplingParams
from paxkv.contracts.engine_output import SchedulerStats
from paxkv.contracts.request_output import (
    TOKEN_BUCKETS_S,
    CompletionOutput,
    CompletionTimes,
    RequestOutput,
    TokenTotals,
)
from paxkv.contracts.schema_keywords import IGNORABLE_KEYWORDS, keyword_at
from paxkv.errors import InvalidRequestError
from paxkv.server.metrics.engine_metrics import FIRST_ENGINE, LABELS, EngineCollector
from paxkv.server.metrics.http_metrics import HttpMetrics
from paxkv.server.metrics.router_metrics import RouterCollector
from paxkv.server.metrics.token_metrics import TokenCollector

# Upper bounds of buckets, the same as in vLLM: dashboards may add up servers of both.
_FIRST_TOKEN_BUCKETS_S = (
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0)
    + (7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
)  # fmt: skip
_REQUEST_BUCKETS_S = (
    (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
    + (120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
)  # fmt: skip
_N_BUCKETS = (1, 2, 5, 10, 20)
_PREEMPTION_BUCKETS = (1, 2, 3, 4, 5, 10, 20)
_FINISH_REASONS = ("stop", "length", "abort", "error")
_DEFAULT_MAX_MODEL_LEN = 2**17


class ServerMetrics:
    """Metrics of the server's requests, together with the engine's own counts.

    Args:
        max_model_len: Upper limit of the buckets of token counts.
        cache_settings: Labels of `vllm:cache_config_info`; None leaves out this metric.
    """

    def __init__(
        self,
        model_name: str,
        *,
        max_model_len: int = _DEFAULT_MAX_MODEL_LEN,
        cache_settings: Mapping[str, str] | None = None,
    ) -> None:
        self._label_values = (model_name, FIRST_ENGINE)
        # A separate registry, because two servers in one process must not share their counts.
        self._registry = CollectorRegistry()
        self._engine = EngineCollector(model_name)
        self._registry.register(self._engine)
        self._tokens = TokenCollector(model_name)
        self._registry.register(self._tokens)
        self._routers = RouterCollector(model_name)
        self._registry.register(self._routers)
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
            info.labels(FIRST_ENGINE, *cache_settings.values()).set(1)

    def render(
        self,
        stats: SchedulerStats,
        token_totals: TokenTotals,
        *,
        encode: Callable[[CollectorRegistry], bytes] = generate_latest,
    ) -> bytes:
        """Encodes all metrics.

        Args:
            encode: Encoder of a format; Prometheus' text format if left out.
        """
        self._engine.update(stats)
        self._tokens.update(token_totals)
        self._routers.update(stats, token_totals)
        return encode(self._registry)

    def record_engine(self, stats: SchedulerStats) -> None:
        """Records the engine's counts. Between two scrapes, another engine may replace it."""
        self._engine.record(stats)

    def start_request(
        self, *, is_stream: bool, params: SamplingParams | BeamSearchParams | None = None
    ) -> "RequestTimer":
        """Starts to measure the times of one prompt."""
        return RequestTimer(self, is_stream=is_stream, params=params)

    def observe_first_token(self, seconds: float) -> None:
        self._time_to_first_token.observe(seconds)

    def observe_prompt(self, output: RequestOutput) -> None:
        """Observes the prompt of a finished request."""
        num_tokens = len(output.prompt_token_ids)
        self._request_prompt_tokens.observe(num_tokens)
        self._computed_tokens.observe(max(num_tokens - output.num_cached_tokens, 0))

    def observe_params(self, params: SamplingParams | BeamSearchParams) -> None:
        """Observes the parameters of a finished request."""
        self._params_n.observe(num_completions_of(params))
        if params.max_tokens is not None:
            self._params_max_tokens.observe(params.max_tokens)

    def observe_finish(self, reason: str, seconds: float) -> None:
        """Counts a completion that ended, and observes its latency."""
        self._request_success[reason].inc()
        self._e2e_latency.observe(seconds)

    def observe_completion(
        self, num_tokens: int, times: CompletionTimes | None, *, num_preemptions: int
    ) -> None:
        """Observes the tokens, preemptions and times of a finished completion."""
        self._request_generation_tokens.observe(num_tokens)
        self._num_preemptions.observe(num_preemptions)
        if times is None:
            return
        self._queue_time.observe(times.queue_s)
        self._prefill_time.observe(times.prefill_s)
        self._decode_time.observe(times.decode_s)
        self._inference_time.observe(times.prefill_s + times.decode_s)
        if num_tokens > 1:
            self._time_per_token.observe(times.decode_s / (num_tokens - 1))

    def observe_ignored_keywords(self, places: Sequence[str]) -> None:
        """Counts the keywords of a finished request's schemas that its grammar ignored."""
        for place in places:
            self._ignored_keywords[keyword_at(place)].inc()

    def observe_longest(self, num_tokens: int) -> None:
        """Observes the length of a finished request's longest completion."""
        self._longest_generation.observe(num_tokens)

    def _make_counters(self) -> None:
        self._request_success = self._counters(
            "vllm:request_success", "completions that ended", "finished_reason", _FINISH_REASONS
        )
        self._ignored_keywords = self._counters(
            "paxkv:ignored_schema_keywords",
            "keywords in JSON schemas of finished requests that no grammar enforces",
            "keyword",
            IGNORABLE_KEYWORDS,
        )

    def _make_time_histograms(self) -> None:
        self._time_to_first_token = self._histogram(
            "vllm:time_to_first_token_seconds",
            "from arrival to the first token",
            _FIRST_TOKEN_BUCKETS_S,
        )
        self._time_per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "mean time of a completion's tokens after the first",
            TOKEN_BUCKETS_S,
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
        self._num_preemptions = self._histogram(
            "vllm:request_num_preemptions", "preemptions of a completion", _PREEMPTION_BUCKETS
        )
        self._params_n = self._histogram(
            "vllm:request_params_n", "completions that a request asks for", _N_BUCKETS
        )

    def _counters(
        self, name: str, help_text: str, label: str, values: Sequence[str]
    ) -> dict[str, Counter]:
        """Makes a counter for each value of a label, so that all are exported from the start."""
        counter = Counter(name, help_text, (*LABELS, label), registry=self._registry)
        return {value: counter.labels(*self._label_values, value) for value in values}

    def _histogram(self, name: str, help_text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(name, help_text, LABELS, buckets=buckets, registry=self._registry)
        return histogram.labels(*self._label_values)


class RequestTimer:
    """Measures the times of one prompt, as a context that lasts as long as the prompt runs.

    In a stream, the time of the first token is measured when it arrives. An answer in one piece
    reports this time. If the context ends before the prompt does, the request counts as aborted.
    After an error that is not the caller's, it counts as failed.
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
        self._has_first_token = False
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
        # Errors of the engine are of type `Exception`; the cancellation after a disconnect is not.
        reason = "error" if isinstance(exc, Exception) else "abort"
        num_completions = 1 if self._params is None else num_completions_of(self._params)
        for _ in range(num_completions - self._num_ended):
            self._metrics.observe_finish(reason, time.perf_counter() - self._start_time)

    def observe(self, output: RequestOutput) -> None:
        """Adds one output; the last one ends the measurement."""
        now = time.perf_counter()
        for completion in output.outputs:
            self._observe_completion(completion, now)
        if output.finished:
            self._is_finished = True
            self._metrics.observe_prompt(output)
            self._metrics.observe_ignored_keywords(output.ignored_schema_keywords)
            self._metrics.observe_longest(max(self._num_tokens.values(), default=0))
            if self._params is not None:
                self._metrics.observe_params(self._params)

    def _observe_completion(self, completion: CompletionOutput, now: float) -> None:
        index, num_tokens = completion.index, len(completion.token_ids)
        if num_tokens and self._is_stream and not self._has_first_token:
            self._has_first_token = True
            self._metrics.observe_first_token(now - self._start_time)
        num_tokens += self._num_tokens.get(index, 0)
        self._num_tokens[index] = num_tokens
        if completion.finish_reason is None:
            return
        self._num_ended += 1
        self._metrics.observe_finish(completion.finish_reason, now - self._start_time)
        self._metrics.observe_completion(
            num_tokens, completion.times, num_preemptions=completion.num_preemptions
        )
        if not self._is_stream and index == 0 and completion.times is not None:
            self._metrics.observe_first_token(completion.times.first_token_s)


def num_completions_of(params: SamplingParams | BeamSearchParams) -> int:
    """The number of completions that a request asks for."""
    return params.beam_width if isinstance(params, BeamSearchParams) else params.n


def build_1_2_5_buckets(most: int) -> list[int]:
    """1, 2, 5, 10, 20, 50 and so on up to `most`: 300 -> [1, 2, 5, 10, 20, 50, 100, 200]."""
    buckets, power = [], 1
    while power <= most:
        buckets += [power * digit for digit in (1, 2, 5) if power * digit <= most]
        power *= 10
    return buckets
