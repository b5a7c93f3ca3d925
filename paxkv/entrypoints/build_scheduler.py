"""Builds schedulers from trace headers: plain, recorded, or to replay a trace. Without JAX."""

import dataclasses
from pathlib import Path

from paxkv.contracts.protocols import GrammarGate, KVConnector
from paxkv.scheduler.async_scheduler import AsyncScheduler
from paxkv.scheduler.scheduler import Scheduler
from paxkv.trace.header import TraceHeader, with_fixed_seed
from paxkv.trace.recorder import TraceRecorder, make_recorder
from paxkv.trace.trace_file import TraceWriter


def make_scheduler(
    header: TraceHeader,
    *,
    connector: KVConnector | None = None,
    grammar_gate: GrammarGate | None = None,
) -> Scheduler:
    """Builds a scheduler. The header of a recorded trace builds an equal scheduler."""
    scheduler_class = AsyncScheduler if header.is_async else Scheduler
    return scheduler_class(
        scheduler_config=header.scheduler_config,
        cache_config=header.cache_config,
        kv_cache_config=header.kv_cache_config,
        max_model_len=header.max_model_len,
        connector=connector,
        grammar_gate=grammar_gate,
        num_lookahead_tokens=header.num_lookahead_tokens,
        use_eagle=header.use_eagle,
        count_common_prefix_blocks=header.count_common_prefix_blocks,
        bursts_change_logits=header.bursts_change_logits,
    )


def record_scheduler(
    header: TraceHeader,
    file: Path,
    *,
    connector: KVConnector | None = None,
    grammar_gate: GrammarGate | None = None,
) -> TraceRecorder:
    """Builds a scheduler that writes its calls to a trace. An existing file is overwritten.

    Raises:
        ConfigError: The file cannot be written.
    """
    header = dataclasses.replace(
        header,
        cache_config=with_fixed_seed(header.cache_config),
        has_connector=connector is not None,
        has_grammar_gate=grammar_gate is not None,
    )
    writer = TraceWriter(file, header)
    return make_recorder(
        header,
        make_scheduler,
        writer.write,
        on_close=writer.close,
        connector=connector,
        grammar_gate=grammar_gate,
    )
