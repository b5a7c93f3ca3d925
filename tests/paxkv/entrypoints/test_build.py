"""Built objects fit the settings; settings that do not fit the model are rejected."""

import dataclasses
import socket
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

import paxkv.entrypoints.build
from models.errors import UnsupportedModelError
from models.platforms import CPU, GPU, Platform
from paxkv.config.engine_config import (
    FIT_MEMORY,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    RunnerConfig,
    SchedulerConfig,
)
from paxkv.config.sampling_defaults import GenerationConfig
from paxkv.config.sampling_params import SamplingParams
from paxkv.config.speculative_config import SpeculativeConfig
from paxkv.entrypoints.build import (
    DEMO_MODEL_NAME,
    build_core,
    build_engine,
    build_llm_client,
    compile_programs,
)
from paxkv.entrypoints.build_scheduler import make_scheduler
from paxkv.errors import (
    ConfigError,
    InvalidRequestError,
    InvariantError,
    KVCacheTooSmallError,
)
from paxkv.runner.memory.memory_plan import HostMemory
from paxkv.runner.programs.program_store import CompiledPrograms, NewCompiledPrograms
from paxkv.runner.shapes.program_shapes import RowShape
from paxkv.trace.replayer import replay
from paxkv.trace.trace_file import TraceReader
from tests.paxkv.fake_build import (
    MAX_POSITIONS,
    MAX_SCALED_POSITIONS,
    VOCAB_SIZE,
    FakeRunner,
    fake_model_parts,
    save_tokenizer,
    started_fake,
)

BOS_ID, EOS_ID = 256, 257


@pytest.fixture
def runner_class(monkeypatch: pytest.MonkeyPatch) -> type[FakeRunner]:
    return fake_model_parts(monkeypatch)


def config_for(folder: Path, **model: object) -> EngineConfig:
    return EngineConfig(model=ModelConfig(model=str(folder), **model))


def test_built_engine_is_warm_and_describes_its_model(
    tmp_path: Path, runner_class: type[FakeRunner]
) -> None:
    save_tokenizer(tmp_path, chat_template="{{ bos_token }}{{ messages[0].content }}")
    engine = build_engine(config_for(tmp_path))
    try:
        assert runner_class.instances[0].is_warm
        assert engine.model_info.served_model_name == str(tmp_path)
        assert engine.model_info.max_model_len == MAX_SCALED_POSITIONS
        # 64 blocks of 16 without the null block.
        assert engine.model_info.max_fitting_tokens == 64 * 16
        assert engine.chat_template.render([{"role": "user", "content": "a"}]) == "<s>a"
        request = engine.input_processor.process("a", SamplingParams(), request_id="r")
        assert request.prompt_token_ids == [BOS_ID, 97]
        assert request.eos_token_ids == (EOS_ID,)
        client = build_llm_client(engine)
        client.add_request(request)
        assert client.call("check_invariants") == "null"
    finally:
        engine.transport.close()


def test_cache_settings_are_text_and_omit_secrets(
    tmp_path: Path, runner_class: type[FakeRunner]
) -> None:
    cache = CacheConfig(prefix_caching_seed="geheim", num_gpu_blocks_override=9)
    engine = build_engine(EngineConfig(model=ModelConfig(model=str(tmp_path)), cache=cache))
    engine.transport.close()
    settings = engine.model_info.cache_settings
    assert settings["block_size"] == "16"
    assert settings["num_gpu_blocks"] == "9"
    assert settings["enable_prefix_caching"] == "True"
    # Under the name that it has in vLLM's metric.
    assert settings["cache_dtype"] == "auto"
    assert "geheim" not in settings.values()
    assert all(name.isidentifier() for name in settings)


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
        return [r.getMessage() for r in caplog.records if r.name == "paxkv.entrypoints.build"]

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
    monkeypatch.setattr("paxkv.entrypoints.build.default_platform", GPU)
    runner_class.max_fitting_len = 99
    assert build_core(config_for(tmp_path)).ready.model_info.max_model_len == 99
    assert "set a larger --gpu-memory-utilization" in caplog.text
    assert runner_class.instances[-1].arguments["host_memory"] is None


def test_dtypes_of_states_have_no_effect_without_recurrent_layers(
    tmp_path: Path, runner_class: type[FakeRunner], caplog: pytest.LogCaptureFixture
) -> None:
    cache = CacheConfig(mamba_ssm_cache_dtype="bfloat16")
    build_core(EngineConfig(model=ModelConfig(model=str(tmp_path)), cache=cache))
    assert "mamba_ssm_cache_dtype has no effect" in caplog.text
    caplog.clear()
    build_core(EngineConfig(model=ModelConfig(model=str(tmp_path))))
    assert "has no effect" not in caplog.text


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


def test_chat_template_comes_from_the_folder_of_the_tokenizer(
    tmp_path: Path, runner_class: type[FakeRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    model.mkdir()
    other.mkdir()
    save_tokenizer(model, chat_template="model")
    save_tokenizer(other, chat_template="other")
    engine = build_engine(config_for(model, tokenizer=str(other)))
    engine.transport.close()
    assert engine.chat_template.render([{"role": "user", "content": "a"}]) == "other"
    asked = []

    def resolve(name: object, **options: object) -> Path:
        asked.append((name, options))
        return other

    monkeypatch.setattr("paxkv.entrypoints.build.resolve_model_folder", resolve)
    build_core(config_for(model, revision="v1", tokenizer_revision="v2", hf_token="hf_geheim"))
    assert asked == [
        (str(model), {"with_weights": False, "revision": "v1", "token": "hf_geheim"}),
        (str(model), {"with_weights": False, "revision": "v2", "token": "hf_geheim"}),
    ]


def test_tekken_json_is_the_tokenizer_if_there_is_no_other(
    tmp_path: Path, runner_class: type[FakeRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, made, read = tmp_path / "model", tmp_path / "made", []
    model.mkdir()
    made.mkdir()
    save_tokenizer(made, chat_template="of tekken.json")
    (model / "tekken.json").write_text("{}")

    def write(path: Path, cache: Path | None) -> Path:
        read.append(path)
        return made

    monkeypatch.setattr("paxkv.entrypoints.build.write_tokenizer_of_tekken", write)
    for tokenizer in (None, str(model)):
        engine = build_engine(config_for(model, tokenizer=tokenizer))
        engine.transport.close()
        message = {"role": "user", "content": "a"}
        assert engine.chat_template.render([message]) == "of tekken.json"
    assert read == [model / "tekken.json"] * 2
    save_tokenizer(model, chat_template="of tokenizer.json")
    engine = build_engine(config_for(model))
    engine.transport.close()
    assert engine.chat_template.render([message]) == "of tokenizer.json"
    assert len(read) == 2


@pytest.mark.parametrize(("load_format", "wanted"), [("auto", [False, True]), ("dummy", [False])])
def test_weights_are_downloaded_after_config_json_is_checked(
    tmp_path: Path,
    runner_class: type[FakeRunner],
    monkeypatch: pytest.MonkeyPatch,
    load_format: str,
    wanted: list[bool],
) -> None:
    asked = []

    def resolve(name: str, *, with_weights: bool, revision: str, token: str) -> Path:
        asked.append(with_weights)
        return tmp_path

    def refuse(folder: Path, **arguments: object) -> None:
        assert arguments["model_impl"] == "my_model:MyModel"
        raise UnsupportedModelError("not supported")

    monkeypatch.setattr("paxkv.entrypoints.build.resolve_model_folder", resolve)
    model = ModelConfig(model="org/name", load_format=load_format, model_impl="my_model:MyModel")
    build_core(EngineConfig(model=model))
    assert asked == wanted
    asked.clear()
    monkeypatch.setattr("paxkv.entrypoints.build.read_model_config", refuse)
    with pytest.raises(UnsupportedModelError, match="not supported"):
        build_core(EngineConfig(model=model))
    assert asked == [False]


@pytest.mark.parametrize(
    ("class_name", "model_impl", "is_logged"),
    [
        ("models.families.llama.LlamaForCausalLM", "auto", False),
        ("models.families.llama.LlamaForCausalLM", "models.families.llama:LlamaForCausalLM", True),
        ("my_model.MyModel", "my_model:MyModel", True),
        # A class that an entry point registers.
        ("my_package.my_model.MyModel", "auto", True),
    ],
)
def test_log_names_an_unusual_model_class(
    tmp_path: Path,
    runner_class: type[FakeRunner],
    caplog: pytest.LogCaptureFixture,
    class_name: str,
    model_impl: str,
    is_logged: bool,
) -> None:
    runner_class.model.class_name = class_name
    with caplog.at_level("INFO"):
        build_core(config_for(tmp_path, model_impl=model_impl))
    assert (f"runs as the class {class_name} (model_impl={model_impl})" in caplog.text) == is_logged


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


def test_folder_without_tokenizer_serves_token_ids(
    tmp_path: Path, runner_class: type[FakeRunner], caplog: pytest.LogCaptureFixture
) -> None:
    engine = build_engine(config_for(tmp_path))
    engine.transport.close()
    assert engine.tokenizer is None and engine.chat_template is None
    assert "no tokenizer.json" in caplog.text
    with pytest.raises(InvalidRequestError):
        engine.input_processor.process("a", SamplingParams(), request_id="r")


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
        monkeypatch.setattr("paxkv.entrypoints.build.default_platform", lambda: platform)
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


def test_folder_without_programs_is_rejected_before_loading(
    tmp_path: Path, runner_class: type[FakeRunner]
) -> None:
    config = EngineConfig(runner=RunnerConfig(compiled_dir=str(tmp_path)))
    with pytest.raises(ConfigError, match="holds no compiled programs"):
        build_engine(config)
    assert not runner_class.instances


@pytest.mark.parametrize(
    ("has", "num_cores", "batch_invariant", "wanted"),
    [
        (["avx2"], 1, False, 256),
        (["avx512f"], 1, False, None),
        (["avx512f", "avx512_fp16"], 1, False, 512),
        (["avx512f", "avx512_fp16"], 1, True, None),
        (["avx512f", "avx512_fp16"], 2, False, None),
    ],
)
def test_panel_width_depends_on_cores_instructions_and_batch_invariance(
    tmp_path: Path,
    runner_class: type[FakeRunner],
    monkeypatch: pytest.MonkeyPatch,
    has: list[str],
    num_cores: int,
    batch_invariant: bool,
    wanted: int | None,
) -> None:
    asked = []

    def load_model(folder: Path, **arguments: object) -> None:
        asked.append(arguments["panel_width"])
        raise ConfigError("no model")

    monkeypatch.setattr("paxkv.entrypoints.build.load_model", load_model)
    platform = CPU(num_threads=num_cores, instruction_sets=frozenset(has))
    monkeypatch.setattr("paxkv.entrypoints.build.default_platform", lambda: platform)
    config = EngineConfig(
        model=ModelConfig(model=str(tmp_path)),
        runner=RunnerConfig(batch_invariant=batch_invariant, enable_compilation_cache=False),
    )
    with pytest.raises(ConfigError, match="no model"):
        build_core(config)
    # Programs are compiled for the same layout of weights as in an engine.
    with pytest.raises(ConfigError, match="no model"):
        compile_programs(config, tmp_path / "out")
    assert asked == [wanted, wanted]


@pytest.mark.parametrize(("asked", "wanted"), [(None, None), (64, 64), (FIT_MEMORY, None)])
def test_model_is_loaded_for_the_requested_length(
    tmp_path: Path,
    runner_class: type[FakeRunner],
    monkeypatch: pytest.MonkeyPatch,
    asked: int | str | None,
    wanted: int | None,
) -> None:
    lengths = []

    def load_model(folder: Path, **arguments: object) -> None:
        lengths.append(arguments["max_model_len"])
        raise ConfigError("no model")

    monkeypatch.setattr("paxkv.entrypoints.build.load_model", load_model)
    config = EngineConfig(
        model=ModelConfig(model=str(tmp_path), max_model_len=asked),
        runner=RunnerConfig(enable_compilation_cache=False),
    )
    with pytest.raises(ConfigError, match="no model"):
        build_core(config)
    assert lengths == [wanted]


def test_recorded_trace_of_an_engine_replays(
    tmp_path: Path, runner_class: type[FakeRunner]
) -> None:
    trace = tmp_path / "trace.jsonl"
    config = EngineConfig(
        model=ModelConfig(model=str(tmp_path)), scheduler=SchedulerConfig(trace_file=str(trace))
    )
    engine = build_engine(config)
    try:
        request = engine.input_processor.process(
            [1, 2, 3], SamplingParams(max_tokens=4), request_id="r"
        )
        client = build_llm_client(engine)
        client.add_request(request)
        while client.num_unfinished_requests:
            client.wait_for_outputs()
        assert client.call("reset_prefix_cache") == "true"
    finally:
        engine.transport.close()
    reader = TraceReader.open(trace)
    assert reader.header.max_model_len == MAX_SCALED_POSITIONS
    # The random seed of this engine, which a replay needs for equal hashes.
    assert reader.header.cache_config.prefix_caching_seed is not None
    summary = replay(reader, make_scheduler)
    assert (summary.num_requests, summary.num_output_tokens, summary.difference) == (1, 4, None)


def test_unwritable_trace_file_is_rejected(tmp_path: Path, runner_class: type[FakeRunner]) -> None:
    config = EngineConfig(
        model=ModelConfig(model=str(tmp_path)),
        scheduler=SchedulerConfig(trace_file=str(tmp_path / "missing" / "t")),
    )
    with pytest.raises(ConfigError, match="trace_file="):
        build_engine(config)
    assert not runner_class.instances, "known before anything is loaded"


def test_used_event_port_is_rejected_before_the_model_is_loaded(
    tmp_path: Path, runner_class: type[FakeRunner]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(ConfigError, match="cannot be bound"):
            build_engine(config_with_events(tmp_path, taken.getsockname()[1]))
    assert not runner_class.instances


def test_event_port_is_released_if_the_model_does_not_load(
    tmp_path: Path, runner_class: type[FakeRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ConfigError("no model")

    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    monkeypatch.setattr("paxkv.entrypoints.build.load_model", fail)
    with pytest.raises(ConfigError, match="no model"):
        build_engine(config_with_events(tmp_path, port))
    socket.create_server(("127.0.0.1", port)).close()


def config_with_events(folder: Path, port: int) -> EngineConfig:
    events = f'{{"endpoint": "tcp://127.0.0.1:{port}"}}'
    return EngineConfig(
        model=ModelConfig(model=str(folder)), cache=CacheConfig(kv_events_config=events)
    )


def test_default_model_is_the_demo(runner_class: type[FakeRunner]) -> None:
    folders = []
    built = build_core(EngineConfig(), on_model_found=folders.append)
    assert built.ready.model_info.served_model_name == DEMO_MODEL_NAME
    assert folders[0].parts[-3:] == ("models", "demo", "checkpoint")


def test_sampling_defaults_are_read_before_the_weights_and_logged_once(
    tmp_path: Path,
    runner_class: type[FakeRunner],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    path = tmp_path / "generation_config.json"
    path.write_text('{"temperature": 0.5, "top_p": 1.0}')
    engine = build_engine(config_for(tmp_path, generation_config="auto"))
    engine.transport.close()
    config = engine.model_info.sampling_defaults.generation_config
    assert config == GenerationConfig(temperature=0.5, top_p=1.0)
    (line,) = [text for text in caplog.messages if "generation_config" in text]
    assert "are temperature=0.5, from" in line and "--generation-config vllm" in line
    caplog.clear()
    build_engine(config_for(tmp_path, generation_config="vllm")).transport.close()
    assert "generation" not in caplog.text

    def load_no_weights(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr("paxkv.entrypoints.build.load_model", load_no_weights)
    path.write_text('{"temperature": -1}')
    with pytest.raises(ConfigError, match=r"generation_config\.json: temperature must be"):
        build_core(config_for(tmp_path))
    with pytest.raises(ConfigError, match="a folder with a generation_config"):
        build_core(config_for(tmp_path, generation_config=str(tmp_path / "none")))


def test_sampling_defaults_of_several_engines_are_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(
        "paxkv.entrypoints.build.start_engines", lambda *_, **__: started_fake(max_new_tokens=5)
    )
    build_engine(EngineConfig(parallel=ParallelConfig(data_parallel_size=2))).transport.close()
    (line,) = [text for text in caplog.messages if "generation_config" in text]
    assert "are max_new_tokens=5, from" in line


def test_eos_tokens_come_from_the_generation_config_folder(
    tmp_path: Path, runner_class: type[FakeRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    for folder in (model, other):
        folder.mkdir()
        (folder / "generation_config.json").write_text("{}")
    load_model, seen = paxkv.entrypoints.build.load_model, []

    def load(folder: Path, **arguments: object) -> object:
        seen.append(arguments["generation_folder"])
        return load_model(folder, **arguments)

    monkeypatch.setattr("paxkv.entrypoints.build.load_model", load)
    for source in ("auto", "vllm", str(other)):
        build_core(config_for(model, generation_config=source))
    assert seen == [model, model, other]


def test_ids_without_a_token_are_never_generated(
    tmp_path: Path, runner_class: type[FakeRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tokenizer(tmp_path)
    left_out = []

    def without_tokens(token_ids: list[int]) -> None:
        left_out.append(token_ids)
        raise ConfigError("seen")

    def load_padded(folder: Path, **arguments: object) -> SimpleNamespace:
        config = SimpleNamespace(vocab_size=VOCAB_SIZE + 2)
        name = "models.families.fake.Padded"
        return SimpleNamespace(
            config=config,
            class_name=name,
            without_tokens=without_tokens,
            describe_weights=lambda: "weights: none",
        )

    monkeypatch.setattr("paxkv.entrypoints.build.load_model", load_padded)
    with pytest.raises(ConfigError, match="seen"):
        build_core(config_for(tmp_path))
    assert left_out == [[VOCAB_SIZE, VOCAB_SIZE + 1]]


def test_built_core_has_the_data_for_its_clients(
    tmp_path: Path, runner_class: type[FakeRunner]
) -> None:
    ready = build_core(
        EngineConfig(
            model=ModelConfig(model=str(tmp_path)),
            scheduler=SchedulerConfig(max_num_batched_tokens=64, enable_chunked_prefill=False),
        )
    ).ready
    assert ready.model_info.vocab_size == VOCAB_SIZE
    assert ready.eos_token_ids == (EOS_ID,)
    assert ready.max_prompt_tokens == 64
    assert (ready.stats.num_blocks, ready.stats.num_steps) == (65, 0)


def test_scheduler_has_the_drafts_that_the_runner_verifies(
    tmp_path: Path, runner_class: type[FakeRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tokenizer(tmp_path)
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    config = dataclasses.replace(
        config_for(tmp_path), runner=RunnerConfig(speculative_config=speculative)
    )
    with pytest.raises(InvariantError, match="3 drafts, but the runner's step features propose up"):
        build_core(config)
    monkeypatch.setattr(runner_class, "max_drafts", 3)
    core = build_core(config).core
    assert core._scheduler.num_lookahead_tokens == 3
    core.close()
