"""paxkv makes the tokens of the workload, and its figures are those of the run."""

from collections.abc import Iterator

import pytest

from benchmarks.engine.offline_engine import EngineSpec
from benchmarks.engine.paxkv_engine import PaxkvEngine, load_engine
from benchmarks.random_checkpoint import MODEL_SHAPES, write_checkpoint
from benchmarks.workloads import make_workload

# Few programs to compile.
SETTINGS = {"block_size": 16, "max_num_seqs": 2, "max_num_batched_tokens": 8}
WORKLOAD = make_workload("prefix", vocab_size=256).first(4, max_output_tokens=3)


@pytest.fixture(scope="module")
def spec(tmp_path_factory) -> EngineSpec:
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("tiny"), MODEL_SHAPES["tiny"])
    common = {"module": "x", "dtype": "float32", "num_threads": 1}
    return EngineSpec(checkpoint=str(checkpoint), settings=SETTINGS, **common)


@pytest.fixture(scope="module")
def engine(spec: EngineSpec) -> Iterator[PaxkvEngine]:
    engine = load_engine(spec, WORKLOAD)
    yield engine
    engine.close()


def test_every_run_begins_with_an_empty_prefix_cache(engine: PaxkvEngine) -> None:
    runs = []
    for _ in range(2):
        engine.prepare()
        runs.append(engine.run(WORKLOAD))
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
        # The first prompt alone takes 68 steps of 8 tokens; the four together took 272.
        assert 68 < figures["steps"] < 272


def test_tokens_are_those_of_plain_torch(engine: PaxkvEngine, spec: EngineSpec) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from benchmarks.compare_torch import contiguous_cache

    # Prompts of all lengths, two at once. The cache was made for another workload, but has room for
    # the longest request of the model.
    workload = make_workload("mixed", vocab_size=256).first(4, max_output_tokens=20)
    engine.prepare()
    output = engine.run(workload)
    peer = contiguous_cache.load_engine(spec, workload).run(workload, batch_size=2)
    assert output.token_ids == peer.token_ids
    assert len({tuple(token_ids) for token_ids in output.token_ids}) == 4
    assert output.figures["preemptions"] == 0
