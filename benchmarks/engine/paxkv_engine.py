"""paxkv as an offline engine, through its synchronous client, with the engine's counters."""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.engine.offline_engine import EngineOutput, EngineSpec, Setting
from benchmarks.engine.settings import engine_config, settings_by_part
from benchmarks.workloads import Workload
from models import read_model_config
from models.platforms import CPU
from paxkv.config.engine_config import EngineConfig
from paxkv.config.parallel_config import ParallelConfig
from paxkv.config.sampling_params import SamplingParams
from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.contracts.engine_output import EngineOutput as EngineMessage
from paxkv.contracts.engine_output import SchedulerStats, StepOutputs
from paxkv.contracts.engine_request import EngineInput
from paxkv.contracts.wire import EngineTransport
from paxkv.entrypoints.build import build_engine, build_llm_client
from paxkv.runner.memory.kv_cache_arrays import kv_cache_dtype

# A request may hold slots for a burst of tokens not yet made, and for part of a block.
SPARE_TOKENS_PER_REQUEST = 64
# A request may read one slot of its states, write another, and hold saved ones.
SLOTS_PER_REQUEST = 4
# For the null block and rounding.
SPARE_TOKENS = 512


def load_engine(spec: EngineSpec, workload: Workload) -> "PaxkvEngine":
    """Builds the engine. Its cache has room for the longest requests (`kv_cache_bytes`).

    Settings are fields of the parts of `EngineConfig`; `cpu_kv_cache_bytes` sets another size.

    Raises:
        ConfigError: No part has a setting of that name, or a value cannot work.
    """
    parts = settings_by_part(spec.settings)
    parts["model"] |= {"model": spec.checkpoint, "dtype": spec.dtype}
    defaults = {"cpu_kv_cache_bytes": kv_cache_bytes(spec, workload, spec.settings)}
    parts["cache"] = defaults | parts["cache"]
    return PaxkvEngine(engine_config(parts))


def kv_cache_bytes(spec: EngineSpec, workload: Workload, settings: Mapping[str, Setting]) -> int:
    """Bytes of a cache that holds the longest requests that may run at once, so none is preempted.

    Args:
        settings: paxkv's settings, of any part. If there are several engines, each has this size.
    """
    parts = settings_by_part(settings)
    model = read_model_config(Path(spec.checkpoint))
    most_at_once = SchedulerConfig(**parts["scheduler"]).max_num_seqs
    num_engines = ParallelConfig(**parts["parallel"]).data_parallel_size
    if num_engines > 1:
        # One engine may get more requests than its share: up to a quarter and three more.
        most_at_once = min(most_at_once, 5 * len(workload.requests) // (4 * num_engines) + 3)
    longest = sorted((r.num_tokens for r in workload.requests), reverse=True)[:most_at_once]
    num_tokens = sum(longest) + SPARE_TOKENS_PER_REQUEST * len(longest)
    # paxkv rejects a cache smaller than the longest request that the model allows.
    num_tokens = max(num_tokens, model.max_position_embeddings) + SPARE_TOKENS
    # The size is ignored on accelerators, which measure their memory.
    wanted = parts["cache"].get("kv_cache_dtype", "auto")
    dtype = kv_cache_dtype(spec.dtype, CPU.of_this_machine(), wanted)
    caches = model.spec(dtype).own_formats.values()
    of_tokens = sum(cache.page_bytes(1) for cache in caches if cache.kind != "state")
    of_states = sum(cache.page_bytes(1) for cache in caches if cache.kind == "state")
    return num_tokens * of_tokens + SLOTS_PER_REQUEST * (1 + len(longest)) * of_states


class PaxkvEngine:
    """An engine in this process, which compiles nothing after it is built."""

    def __init__(self, config: EngineConfig) -> None:
        engine = build_engine(config)
        self._input_processor = engine.input_processor
        self._tap = OutputTap(engine.transport)
        self._client = build_llm_client(dataclasses.replace(engine, transport=self._tap))
        self._request_numbers = itertools.count()

    def prepare(self) -> None:
        """Resets the prefix cache.

        Raises:
            RuntimeError: Requests are running, or one of several engines has ended.
        """
        check_engines(msgspec.json.decode(self._client.call("get_stats"), type=SchedulerStats))
        if self._client.call("reset_prefix_cache", False) != "true":
            raise RuntimeError("the prefix cache could not be reset: requests still hold blocks.")

    def run(self, workload: Workload) -> EngineOutput:
        """Runs all requests at once."""
        before = self._tap.start()
        # No two runs share an id.
        req_ids = [str(next(self._request_numbers)) for _ in workload.requests]
        for req_id, request in zip(req_ids, workload.requests, strict=True):
            params = SamplingParams(
                temperature=0.0,
                max_tokens=request.num_output_tokens,
                ignore_eos=True,
                detokenize=False,
            )
            self._client.add_request(
                self._input_processor.process(request.prompt_token_ids, params, request_id=req_id)
            )
        token_ids: dict[str, list[int]] = {}
        while len(token_ids) < len(req_ids):
            for output in self._client.wait_for_outputs():
                token_ids[output.request_id] = output.outputs[0].token_ids
        check_engines(self._tap.stats)
        figures = self._tap.figures() | _counted(before, self._tap.stats)
        return EngineOutput(token_ids=[token_ids[req_id] for req_id in req_ids], figures=figures)

    def logit_gap(self, token_ids: list[int], first: int, second: int) -> float:
        raise NotImplementedError("paxkv reports no logits; another engine must compute the gap.")

    def close(self) -> None:
        self._client.close()


def check_engines(stats: SchedulerStats) -> None:
    """Checks that all engines run. After one has ended, the others would do its work.

    Raises:
        RuntimeError: An engine has ended.
    """
    if not all(engine.num_blocks for engine in stats.engines):
        raise RuntimeError("an engine has ended; is there memory for all of them?")


class OutputTap:
    """A transport that records the time of each request's first token, and the engine's statistics.

    This costs almost nothing. Streaming would cost more, because it makes one output per token.
    """

    def __init__(self, transport: EngineTransport) -> None:
        self._transport = transport
        self._stats = SchedulerStats()
        self._start_s = 0.0
        self._first_token_s: dict[str, float] = {}
        # Token positions that requests held, and used, summed over steps.
        self._num_allocated_slots = 0
        self._num_used_slots = 0

    def start(self) -> SchedulerStats:
        """Begins a run; returns the current counters."""
        self._start_s = time.perf_counter()
        self._first_token_s = {}
        self._num_allocated_slots = self._num_used_slots = 0
        return self._stats

    @property
    def stats(self) -> SchedulerStats:
        """The statistics of the last step."""
        return self._stats

    def figures(self) -> dict[str, float]:
        """Figures of the run since `start`."""
        waits_ms = [1000 * (s - self._start_s) for s in self._first_token_s.values()]
        figures = {
            "ttft_p50_ms": statistics.median(waits_ms),
            "ttft_p99_ms": float(np.percentile(waits_ms, 99)),
        }
        # The engine counts slots every few steps, so a short run may have no count.
        if self._num_allocated_slots:
            share_used = self._num_used_slots / self._num_allocated_slots
            figures["kv_waste_percent"] = 100 * (1 - share_used)
        return figures

    def send(self, message: EngineInput) -> None:
        self._transport.send(message)

    def receive(self, timeout_s: float | None = None) -> EngineMessage | None:
        message = self._transport.receive(timeout_s)
        if isinstance(message, StepOutputs):
            now = time.perf_counter()
            for output in message.outputs:
                if output.new_token_ids and output.request_id not in self._first_token_s:
                    self._first_token_s[output.request_id] = now
            self._stats = message.stats
            self._num_allocated_slots += message.stats.num_allocated_slots
            self._num_used_slots += message.stats.num_used_slots
        return message

    def close(self) -> None:
        self._transport.close()


def _counted(before: SchedulerStats, after: SchedulerStats) -> dict[str, float]:
    """Figures of a run from the engine's counters before and after it."""
    num_padded = after.num_padded_tokens - before.num_padded_tokens
    num_scheduled = after.num_scheduled_tokens - before.num_scheduled_tokens
    num_queries = after.prefix_cache_queries - before.prefix_cache_queries
    num_hits = after.prefix_cache_hits - before.prefix_cache_hits
    return {
        "steps": after.num_steps - before.num_steps,
        "preemptions": after.num_preemptions - before.num_preemptions,
        "padding_waste_ratio": num_padded / (num_padded + num_scheduled),
        "prefix_hit_percent": 100 * num_hits / num_queries if num_queries else 0.0,
        # Counted since the engine was ready, so the warm-up and earlier runs are included.
        "compiles_after_ready": after.num_compiles_after_ready,
    }
