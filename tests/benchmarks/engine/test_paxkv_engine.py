"""paxkv makes the tokens of the workload, and its figures describe the run."""

from benchmarks.engine.offline_engine import EngineSpec
from benchmarks.engine.paxkv_engine import load_engine
from benchmarks.workloads import make_workload
from tests.small_engine import CHECKPOINT, SETTINGS

WORKLOAD = make_workload("prefix", vocab_size=256).first(4, max_output_tokens=3)


def test_every_run_begins_with_an_empty_prefix_cache() -> None:
    common = {"module": "x", "dtype": "float32", "num_threads": 1}
    spec = EngineSpec(checkpoint=str(CHECKPOINT), settings=SETTINGS, **common)
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
