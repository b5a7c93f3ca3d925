"""A header decides which scheduler is built, and a recorded header builds an equal one."""

import dataclasses

import pytest

from paxkv.entrypoints.build_scheduler import make_scheduler, record_scheduler
from paxkv.kv_cache.observers.block_movements import BlockMovementLog
from paxkv.scheduler.async_scheduler import AsyncScheduler
from paxkv.scheduler.scheduler import Scheduler
from paxkv.trace.trace_file import TraceReader
from tests.paxkv.trace.small_traces import make_header


class Gate:
    def is_ready(self, request_id):
        return True


@pytest.mark.parametrize(("is_async", "expected"), [(False, Scheduler), (True, AsyncScheduler)])
def test_header_decides_which_scheduler_is_built(is_async, expected):
    header = dataclasses.replace(make_header(), is_async=is_async, num_lookahead_tokens=2)
    scheduler = make_scheduler(header)
    assert type(scheduler) is expected
    assert scheduler.scheduler_config == header.scheduler_config
    assert scheduler.max_model_len == header.max_model_len
    assert scheduler.num_lookahead_tokens == 2
    assert scheduler.kv_cache_manager.block_pool.num_blocks == header.kv_cache_config.num_blocks


def test_only_a_recorded_scheduler_logs_block_movements(tmp_path):
    def num_logs(scheduler):
        observers = scheduler.kv_cache_manager.block_pool.observers
        return sum(isinstance(observer, BlockMovementLog) for observer in observers)

    assert num_logs(make_scheduler(make_header())) == 0
    recorder = record_scheduler(make_header(), tmp_path / "t")
    assert num_logs(recorder) == 1
    recorder.close()


def test_recorded_header_names_connector_and_gate_and_fixes_the_seed(tmp_path):
    header = make_header()
    header = dataclasses.replace(
        header, cache_config=dataclasses.replace(header.cache_config, prefix_caching_seed=None)
    )
    record_scheduler(header, tmp_path / "t", grammar_gate=Gate()).close()
    read = TraceReader.open(tmp_path / "t").header
    assert (read.has_grammar_gate, read.has_connector) == (True, False)
    assert read.cache_config.prefix_caching_seed is not None
