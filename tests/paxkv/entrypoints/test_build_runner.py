"""The runner fits the memory of the machine, and the length of requests fits the KV cache."""

import dataclasses
from pathlib import Path

import jax
import pytest

from models.platforms import CPU, GPU, Platform
from paxkv.config.cache_config import CacheConfig
from paxkv.config.engine_config import EngineConfig
from paxkv.config.model_config import FIT_MEMORY, ModelConfig
from paxkv.config.parallel_config import ParallelConfig
from paxkv.config.runner_config import RunnerConfig
from paxkv.config.sampling_params import SamplingParams
from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.entrypoints import build_runner
from paxkv.entrypoints.build import build_core, build_engine
from paxkv.errors import ConfigError, InvalidRequestError, KVCacheTooSmallError
from paxkv.runner.memory.memory_plan import HostMemory
from paxkv.runner.programs.program_store import CompiledPrograms, NewCompiledPrograms
from paxkv.runner.shapes.program_shapes import RowShape
from tests.paxkv.fake_build import (
    MAX_POSITIONS,
    MAX_SCALED_POSITIONS,
    FakeRunner,
    config_for,
)


def test_max_model_len_is_the_models_unless_a_smaller_one_is_set(
    tmp_path: Path, runner_class: type[FakeRunner]
) -> None:
    engine = build_engine(config_for(tmp_path, max_model_len=40))
    engine.transport.close()
    assert engine.model_info.max_model_len == 40
    assert runner_class.instances[0].arguments["max_model_len"] == 40
    with pytest.raises(
        ConfigError, match=f"{MAX_SCALED_POSITIONS + 1} .* {MAX_SCALED_POSITIONS} positions"
    ):
        build_engine(config_for(tmp_path, max_model_len=MAX_SCALED_POSITIONS + 1))


def test_unset_max_model_len_is_lowered_to_what_the_cache_holds(
    tmp_path: Path, runner_class: type[FakeRunner], caplog: pytest.LogCaptureFixture
) -> None:
    def max_model_len(num_blocks: int | None = None) -> int:
        caplog.clear()
        cache = CacheConfig(num_gpu_blocks_override=num_blocks)
        config = EngineConfig(model=ModelConfig(model=str(tmp_path)), cache=cache)
        return build_core(config).ready.model_info.max_model_len

    def warnings() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.name == build_runner.__name__]

    # Blocks of 16 tokens, and the null block.
    assert max_model_len(num_blocks=1 + 8) == MAX_SCALED_POSITIONS
    assert not [text for text in warnings() if "max_model_len" in text]
    assert max_model_len(num_blocks=1 + 7) == 7 * 16
    (warning,) = [text for text in warnings() if "max_model_len" in text]
    for part in (f"{MAX_SCALED_POSITIONS} positions", "--max-model-len 112", "--num-gpu-blocks"):
        assert part in warning
    runner_class.max_fitting_len = 99
    assert max_model_len() == 99
    (warning,) = [text for text in warnings() if "max_model_len" in text]
    assert "is 99:" in warning and "--cpu-kv-cache-bytes" in warning
    # A length that was given is never made shorter.
    with pytest.raises(KVCacheTooSmallError, match=f"{MAX_SCALED_POSITIONS}"):
        build_core(config_for(tmp_path, max_model_len=MAX_SCALED_POSITIONS))


def test_warning_names_the_memory_flag_of_the_device(
    tmp_path: Path,
    runner_class: type[FakeRunner],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(build_runner, "default_platform", GPU)
    runner_class.max_fitting_len = 99
    assert build_core(config_for(tmp_path)).ready.model_info.max_model_len == 99
    assert "set a larger --gpu-memory-utilization" in caplog.text
    assert runner_class.instances[-1].arguments["host_memory"] is None


def test_free_memory_is_measured_once_and_shared_by_all_engines(
    tmp_path: Path, runner_class: type[FakeRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    free_bytes = iter([9_000, 7_000, 5_000])
    monkeypatch.setattr("models.platforms.cpu.available_memory_bytes", lambda: next(free_bytes))
    runner_class.max_fitting_len = 99
    config = dataclasses.replace(
        config_for(tmp_path), parallel=ParallelConfig(data_parallel_size=2)
    )
    build_core(config)
    # The second engine's weights will take as much as the first one's.
    weight_bytes = runner_class.model.device_bytes
    assert {runner.arguments["host_memory"] for runner in runner_class.instances} == {
        HostMemory(free_bytes=(9_000 - weight_bytes) // 2)
    }


@pytest.mark.parametrize(("free_bytes", "warns"), [(65 * 1024, False), (65 * 1024 - 1, True)])
def test_cache_larger_than_the_free_memory_gives_a_warning(
    tmp_path: Path,
    runner_class: type[FakeRunner],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    free_bytes: int,
    warns: bool,
) -> None:
    monkeypatch.setattr("models.platforms.cpu.available_memory_bytes", lambda: free_bytes)
    build_core(config_for(tmp_path))
    # 65 blocks, of K and V for 16 tokens with 8 numbers of 4 bytes.
    assert ("the system may kill this process" in caplog.text) == warns


def test_auto_max_model_len_is_what_the_cache_holds(
    tmp_path: Path, runner_class: type[FakeRunner]
) -> None:
    def max_model_len(num_blocks: int | None = None) -> int:
        cache = CacheConfig(num_gpu_blocks_override=num_blocks)
        model = ModelConfig(model=str(tmp_path), max_model_len=FIT_MEMORY)
        return build_core(EngineConfig(model=model, cache=cache)).ready.model_info.max_model_len

    assert max_model_len() == MAX_SCALED_POSITIONS
    # Blocks of 16 tokens, and the null block.
    assert max_model_len(num_blocks=1 + 2) == 32
    runner_class.max_fitting_len = 21
    assert max_model_len() == 21


def test_compiled_programs_limit_max_model_len(
    tmp_path: Path, runner_class: type[FakeRunner], caplog: pytest.LogCaptureFixture
) -> None:
    """The length for which programs were compiled counts, not the current memory."""

    def max_model_len(compiled: int) -> int:
        out = tmp_path / f"out-{compiled}"
        shape = RowShape(num_rows=2, max_model_len=compiled)
        NewCompiledPrograms(out).open({"number of KV blocks": "77"}, [shape], jax.devices())
        config = EngineConfig(
            model=ModelConfig(model=str(tmp_path)), runner=RunnerConfig(compiled_dir=str(out))
        )
        return build_core(config).ready.model_info.max_model_len

    assert max_model_len(compiled=MAX_SCALED_POSITIONS) == MAX_SCALED_POSITIONS
    assert "max_model_len" not in caplog.text
    assert max_model_len(compiled=MAX_POSITIONS) == MAX_POSITIONS
    assert "no room" not in caplog.text
    assert f"is {MAX_POSITIONS}, the length for which the programs were compiled" in caplog.text


def test_settings_reach_the_runner(tmp_path: Path, runner_class: type[FakeRunner]) -> None:
    config = EngineConfig(
        model=ModelConfig(model=str(tmp_path), seed=5, served_model_name=("mine", "b", "c")),
        cache=CacheConfig(block_size=8, num_gpu_blocks_override=17),
        scheduler=SchedulerConfig(max_num_batched_tokens=64, enable_chunked_prefill=False),
    )
    engine = build_engine(config, show_progress=True)
    engine.transport.close()
    arguments = runner_class.instances[0].arguments
    assert (arguments["seed"], arguments["show_progress"]) == (5, True)
    assert arguments["cache_config"] is config.cache
    assert engine.model_info.served_model_name == "mine"
    assert engine.model_info.model_names == ("mine", "b", "c")
    assert engine.model_info.max_fitting_tokens == 128
    assert engine.model_info.max_num_seqs == config.scheduler.max_num_seqs
    with pytest.raises(InvalidRequestError, match="chunked prefill"):
        engine.input_processor.process([1] * 65, SamplingParams(max_tokens=1), request_id="r")


def test_store_of_programs_reaches_the_runner(
    tmp_path: Path, runner_class: type[FakeRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled programs set the number of blocks that would otherwise be measured."""
    identity = {"number of KV blocks": "77"}
    NewCompiledPrograms(tmp_path / "out").open(identity, [], jax.devices())

    def cache_config(platform: Platform, **cache: object) -> CacheConfig:
        monkeypatch.setattr(build_runner, "default_platform", lambda: platform)
        config = EngineConfig(
            model=ModelConfig(model=str(tmp_path)),
            cache=CacheConfig(**cache),
            runner=RunnerConfig(compiled_dir=str(tmp_path / "out")),
        )
        build_engine(config).transport.close()
        arguments = runner_class.instances[-1].arguments
        assert isinstance(arguments["program_store"], CompiledPrograms)
        return arguments["cache_config"]

    assert cache_config(GPU()).num_gpu_blocks_override == 77
    assert cache_config(GPU(), num_gpu_blocks_override=5).num_gpu_blocks_override == 5
    assert cache_config(CPU.of_this_machine()).num_gpu_blocks_override == 77
    given = cache_config(CPU.of_this_machine(), cpu_kv_cache_bytes=2**20)
    assert (given.num_gpu_blocks_override, given.cpu_kv_cache_bytes) == (None, 2**20)
