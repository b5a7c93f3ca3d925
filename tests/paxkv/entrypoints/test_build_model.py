"""The settings choose the model, its tokenizer and its folder."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from models.errors import UnsupportedModelError
from models.platforms import CPU
from paxkv.config.engine_config import EngineConfig
from paxkv.config.model_config import FIT_MEMORY, ModelConfig
from paxkv.config.runner_config import RunnerConfig
from paxkv.entrypoints import build_model
from paxkv.entrypoints.build import build_core, build_engine, compile_programs
from paxkv.errors import ConfigError
from tests.paxkv.fake_build import (
    VOCAB_SIZE,
    FakeRunner,
    config_for,
    save_tokenizer,
)


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

    monkeypatch.setattr(build_model, "resolve_model_folder", resolve)
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

    monkeypatch.setattr(build_model, "write_mistral_tokenizer", write)
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

    monkeypatch.setattr(build_model, "resolve_model_folder", resolve)
    model = ModelConfig(model="org/name", load_format=load_format, model_impl="my_model:MyModel")
    build_core(EngineConfig(model=model))
    assert asked == wanted
    asked.clear()
    monkeypatch.setattr(build_model, "read_model_config", refuse)
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

    monkeypatch.setattr(build_model, "load_model", load_model)
    platform = CPU(num_threads=num_cores, instruction_sets=frozenset(has))
    monkeypatch.setattr(build_model, "default_platform", lambda: platform)
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

    monkeypatch.setattr(build_model, "load_model", load_model)
    config = EngineConfig(
        model=ModelConfig(model=str(tmp_path), max_model_len=asked),
        runner=RunnerConfig(enable_compilation_cache=False),
    )
    with pytest.raises(ConfigError, match="no model"):
        build_core(config)
    assert lengths == [wanted]


def test_eos_tokens_come_from_the_generation_config_folder(
    tmp_path: Path, runner_class: type[FakeRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    for folder in (model, other):
        folder.mkdir()
        (folder / "generation_config.json").write_text("{}")
    load_model, seen = build_model.load_model, []

    def load(folder: Path, **arguments: object) -> object:
        seen.append(arguments["generation_folder"])
        return load_model(folder, **arguments)

    monkeypatch.setattr(build_model, "load_model", load)
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

    monkeypatch.setattr(build_model, "load_model", load_padded)
    with pytest.raises(ConfigError, match="seen"):
        build_core(config_for(tmp_path))
    assert left_out == [[VOCAB_SIZE, VOCAB_SIZE + 1]]
