"""paxkv makes the tokens of the workload, and its figures describe the run."""

import json
from pathlib import Path

from benchmarks.engine.offline_engine import EngineSpec
from benchmarks.engine.paxkv_engine import kv_cache_bytes, load_engine
from benchmarks.random_checkpoint import MODEL_SHAPES
from benchmarks.workloads import make_workload
from tests.demo_programs import SETTINGS, demo_programs
from tests.engine_compilations import process_engine_compilations
from tests.small_engine import CHECKPOINT

WORKLOAD = make_workload("prefix", vocab_size=256).first(4, max_output_tokens=3)


def test_every_run_begins_with_an_empty_prefix_cache() -> None:
    common = {"module": "x", "dtype": "float32", "num_threads": 1}
    # The programs are for the cache that servers of tests have.
    settings = SETTINGS | {"compiled_dir": str(demo_programs()), "cpu_kv_cache_bytes": 2**28}
    spec = EngineSpec(checkpoint=str(CHECKPOINT), settings=settings, **common)
    with process_engine_compilations():
        engine, runs = load_engine(spec, WORKLOAD), []
    for _ in range(2):
        engine.prepare()
        runs.append(engine.run(WORKLOAD))
    engine.close()
    assert runs[0].token_ids == runs[1].token_ids
    assert [len(token_ids) for token_ids in runs[0].token_ids] == [3, 3, 3, 3]
    for run in runs:
        figures = run.figures
        # The token budget lets the first prompt finish before the others, which find its blocks: at
        # most 512 of 544 tokens in three of four requests.
        assert 50 < figures["prefix_hit_percent"] <= 100 * 3 * 512 / (4 * 544)
        assert 0 < figures["ttft_p50_ms"] <= figures["ttft_p99_ms"]
        assert 0 <= figures["padding_waste_ratio"] < 0.5
        assert 0 <= figures["kv_waste_percent"] < 10
        assert figures["preemptions"] == figures["compiles_after_ready"] == 0
        # The first prompt alone takes 17 steps of 32 tokens; the four together took 68.
        assert 17 < figures["steps"] < 68


def test_states_have_room_for_each_request_and_not_for_each_token(tmp_path: Path) -> None:
    shape = MODEL_SHAPES["small-mamba2"]
    (tmp_path / "config.json").write_text(json.dumps(shape.config_fields()))
    common = {"module": "x", "dtype": "float32", "num_threads": 1, "settings": {}}
    spec = EngineSpec(checkpoint=str(tmp_path), **common)
    num_bytes = [
        kv_cache_bytes(spec, WORKLOAD.first(num_requests, max_output_tokens=3), {})
        for num_requests in (1, 4)
    ]
    state_bytes = shape.num_state_heads * shape.state_head_dim * shape.state_key_dim * 4
    of_three_requests = num_bytes[1] - num_bytes[0]
    # A request of this workload has more than 500 tokens.
    assert (
        3 * shape.num_layers * state_bytes < of_three_requests < 30 * shape.num_layers * state_bytes
    )
