"""Engines of this process that several files use: each worker makes each of them once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from paxkv import LLM
from paxkv.engine import burst_length
from paxkv.runner.model_runner import ModelRunner
from tests.demo_programs import SETTINGS, demo_programs
from tests.end_to_end.checked_engine import make_runner
from tests.end_to_end.engine_harness import RecordingRunner
from tests.end_to_end.golden_runs import Runners, make_runners
from tests.engine_compilations import process_engine_compilations
from tests.oracles.make_checkpoint import write_random_checkpoint


@pytest.fixture(autouse=True)
def bursts_of_a_slow_machine_are_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The length of bursts depends on requests alone. A step of a busy machine can take .2 s."""
    monkeypatch.setattr(burst_length, "MAX_BURST_S", 1000.0)
    monkeypatch.setattr(burst_length, "MAX_STREAMED_BURST_S", 1000.0)


@pytest.fixture(scope="session")
def demo_llm() -> Iterator[LLM]:
    """The demo model offline, with the settings and the programs of servers."""
    with process_engine_compilations():
        llm = LLM(compiled_dir=str(demo_programs()), **SETTINGS)
    with llm:
        yield llm


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of two layers, of which `tiny_runner` is."""
    folder = tmp_path_factory.mktemp("tiny")
    return write_random_checkpoint(folder, seed=32, std=0.2, num_layers=2)


@pytest.fixture(scope="session")
def tiny_runner(tiny_checkpoint: Path) -> ModelRunner:
    """Of the checked engines of forks, beams and prompt log-probabilities."""
    return make_runner(tiny_checkpoint, is_warm=True)


@pytest.fixture(scope="session")
def windows_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A full layer, then one with a window of 12."""
    return write_random_checkpoint(
        tmp_path_factory.mktemp("windows"),
        "qwen2",
        seed=33,
        std=0.2,
        num_layers=2,
        extra_config={"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
    )


@pytest.fixture(scope="session")
def windows_runner(windows_checkpoint: Path) -> ModelRunner:
    """Of checked engines of `windows_checkpoint`, with a cache in float16."""
    return make_runner(
        windows_checkpoint, is_warm=True, has_prompt_logprobs=False, kv_cache_dtype="float16"
    )


@pytest.fixture(scope="session")
def runners(tmp_path_factory: pytest.TempPathFactory) -> Runners:
    """Recording runners of golden recipes, with programs of every size."""
    return make_runners(tmp_path_factory.mktemp("recipes"))


@pytest.fixture(scope="session")
def quick_runners(tmp_path_factory: pytest.TempPathFactory) -> Runners:
    """Those of the normal suite, for steps of up to 64 tokens: few programs."""
    return make_runners(
        tmp_path_factory.mktemp("quick"), max_num_batched_tokens=64, has_few_sizes=True
    )


@pytest.fixture(scope="session")
def llama_runner(quick_runners: Runners) -> RecordingRunner:
    return quick_runners("llama", 8)
