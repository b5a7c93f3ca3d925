"""Built objects fit the settings; settings that do not fit the model are rejected."""

import dataclasses
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from paxkv.config.cache_config import CacheConfig
from paxkv.config.engine_config import EngineConfig
from paxkv.config.model_config import ModelConfig
from paxkv.config.parallel_config import ParallelConfig
from paxkv.config.runner_config import RunnerConfig
from paxkv.config.sampling_defaults import GenerationConfig
from paxkv.config.sampling_params import SamplingParams
from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.config.speculative_config import SpeculativeConfig
from paxkv.entrypoints import build
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
)
from paxkv.trace.replayer import replay
from paxkv.trace.trace_file import TraceReader
from tests.paxkv.fake_build import (
    MAX_SCALED_POSITIONS,
    VOCAB_SIZE,
    FakeRunner,
    config_for,
    save_tokenizer,
    started_fake,
)

BOS_ID, EOS_ID = 256, 257


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


def test_dtypes_of_states_have_no_effect_without_recurrent_layers(
    tmp_path: Path, runner_class: type[FakeRunner], caplog: pytest.LogCaptureFixture
) -> None:
    cache = CacheConfig(mamba_ssm_cache_dtype="bfloat16")
    build_core(EngineConfig(model=ModelConfig(model=str(tmp_path)), cache=cache))
    assert "mamba_ssm_cache_dtype has no effect" in caplog.text
    caplog.clear()
    build_core(EngineConfig(model=ModelConfig(model=str(tmp_path))))
    assert "has no effect" not in caplog.text


def test_folder_without_tokenizer_serves_token_ids(
    tmp_path: Path, runner_class: type[FakeRunner], caplog: pytest.LogCaptureFixture
) -> None:
    engine = build_engine(config_for(tmp_path))
    engine.transport.close()
    assert engine.tokenizer is None and engine.chat_template is None
    assert "no tokenizer.json" in caplog.text
    with pytest.raises(InvalidRequestError):
        engine.input_processor.process("a", SamplingParams(), request_id="r")


def test_folder_without_programs_is_rejected_before_loading(
    tmp_path: Path, runner_class: type[FakeRunner]
) -> None:
    config = EngineConfig(runner=RunnerConfig(compiled_dir=str(tmp_path)))
    with pytest.raises(ConfigError, match="holds no compiled programs"):
        build_engine(config)
    assert not runner_class.instances


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
    monkeypatch.setattr("paxkv.entrypoints.build_model.load_model", fail)
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

    monkeypatch.setattr("paxkv.entrypoints.build_model.load_model", load_no_weights)
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
    with pytest.raises(InvariantError, match="3 drafts, but the runner's step features propose up"):
        compile_programs(config, tmp_path / "compiled")
    assert not any(runner.is_warm for runner in runner_class.instances)
    monkeypatch.setattr(runner_class, "max_drafts", 3)
    core = build_core(config).core
    assert core._scheduler.num_lookahead_tokens == 3
    core.close()


@pytest.mark.parametrize(
    ("fields", "batch_invariant", "message"),
    [
        ({"method": "ngram", "drafts_in_bursts": True}, False, None),
        ({"method": "ngram", "num_speculative_tokens": 33}, True, "at most 32 drafts"),
        ({"method": "ngram"}, True, None),
        ({"method": "suffix"}, False, None),
        ({"method": "draft_model", "model": "smaller"}, False, None),
    ],
)
def test_models_with_states_verify_drafts(
    fields: dict[str, object], batch_invariant: bool, message: str | None
) -> None:
    speculative = SpeculativeConfig(**{"num_speculative_tokens": 3} | fields)
    config = RunnerConfig(speculative_config=speculative, batch_invariant=batch_invariant)
    num_drafts = speculative.num_speculative_tokens
    runner = SimpleNamespace(
        max_drafts=num_drafts, kv_cache_config=SimpleNamespace(has_states=True)
    )
    if message is None:
        assert build._find_num_lookahead_tokens(config, runner) == num_drafts
        return
    with pytest.raises(ConfigError, match=message):
        build._find_num_lookahead_tokens(config, runner)
