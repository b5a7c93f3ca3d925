"""Sampling defaults come from the file and the settings; errors name the place of a bad value."""

import json
from pathlib import Path

import pytest

from paxkv.config.generation_config import (
    find_sampling_defaults,
    generation_config_folder,
    read_generation_config,
)
from paxkv.config.sampling_defaults import GenerationConfig, SamplingDefaults
from paxkv.errors import ConfigError

NOTHING = GenerationConfig()
# As in Qwen3's file, with a length limit.
FIELDS = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "max_new_tokens": 2048,
    "transformers_version": "4.51.0",
}


def write(folder: Path, content: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


def test_fields_that_the_file_lacks_stay_unset(tmp_path: Path) -> None:
    defaults = find_sampling_defaults("auto", NOTHING, write(tmp_path, FIELDS))
    assert defaults == SamplingDefaults(
        generation_config=GenerationConfig(
            temperature=0.6, top_k=20, top_p=0.95, max_new_tokens=2048
        )
    )
    assert defaults.generation_config.sampling_keywords() == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "max_tokens": 2048,
    }


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # Defaults that transformers adds to the file do not count.
        ({}, {}),
        ({"top_k": 50}, {"top_k": 50}),
        ({"do_sample": False}, {}),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.7}),
        ({"temperature": 0.0, "top_k": 0}, {"temperature": 0.0, "top_k": 0}),
        ({"temperature": None, "max_new_tokens": None, "min_p": 0.1}, {"min_p": 0.1}),
    ],
)
def test_only_values_in_the_file_count(tmp_path: Path, fields, expected) -> None:
    assert read_generation_config(write(tmp_path, fields)).given == expected


def test_a_model_without_the_file_has_no_defaults(tmp_path: Path) -> None:
    assert find_sampling_defaults("auto", NOTHING, tmp_path) == SamplingDefaults()


def test_settings_choose_the_file_and_override_it(tmp_path: Path) -> None:
    model = write(tmp_path / "model", FIELDS)
    other = write(tmp_path / "other", {"top_p": 0.5, "max_new_tokens": 64})
    override = GenerationConfig(temperature=0.2, max_new_tokens=8)

    def found(source: str, on_top: GenerationConfig) -> tuple[dict[str, float], int | None]:
        defaults = find_sampling_defaults(source, on_top, model)
        return defaults.generation_config.given, defaults.max_tokens_limit

    filters = {"top_p": 0.95, "top_k": 20}
    assert found("auto", override) == ({"temperature": 0.2, **filters, "max_new_tokens": 8}, 8)
    assert found("vllm", NOTHING) == ({}, None)
    assert found("vllm", override) == ({"temperature": 0.2, "max_new_tokens": 8}, 8)
    # Another folder is also the operator's choice.
    assert found(str(other), NOTHING) == ({"top_p": 0.5, "max_new_tokens": 64}, 64)
    assert found(str(other), override)[1] == 8
    assert generation_config_folder(str(other), model) == other
    assert generation_config_folder("vllm", model) == generation_config_folder("auto", model)


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("temperature", -0.1, r"a number in \[0.0, 100.0\], got -0.1"),
        ("temperature", "hot", "got 'hot'"),
        ("temperature", True, "got True"),
        ("temperature", float("nan"), "got nan"),
        ("top_p", 0, r"\(0.0, 1.0\], got 0"),
        ("top_k", 20.5, "an integer in"),
        ("min_p", 2, "got 2"),
        ("repetition_penalty", 0, "got 0"),
        ("max_new_tokens", 0, "an integer in"),
        ("max_new_tokens", 2**31, "an integer in"),
    ],
)
def test_the_error_names_file_value_and_alternatives(tmp_path, name, value, wanted) -> None:
    write(tmp_path, {name: value})
    with pytest.raises(ConfigError, match=wanted) as raised:
        find_sampling_defaults("auto", NOTHING, tmp_path)
    message = str(raised.value)
    assert message.startswith(f"{tmp_path / 'generation_config.json'}: {name} must be ")
    assert "--generation-config vllm" in message
    assert find_sampling_defaults("vllm", NOTHING, tmp_path) == SamplingDefaults()
    override = GenerationConfig(**{name: 1})
    assert find_sampling_defaults("auto", override, tmp_path).generation_config == override


@pytest.mark.parametrize("content", ["{", "[]", "\x80", "[" * 10**5], ids=[*"abc", "deep"])
def test_a_file_that_is_not_an_object_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        find_sampling_defaults("auto", NOTHING, tmp_path)


def test_another_folder_must_have_the_file(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"is not a folder with a gen.* It must be auto .*, vllm .*, or such",
    ):
        find_sampling_defaults(str(tmp_path), NOTHING, tmp_path)


def test_null_in_an_override_resets_the_files_value(tmp_path: Path) -> None:
    override = GenerationConfig.from_fields({"temperature": None, "top_k": None})
    defaults = find_sampling_defaults("auto", override, write(tmp_path, FIELDS))
    config = defaults.generation_config
    assert (config.temperature, config.top_k, config.top_p) == (1.0, 0, 0.95)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_byte_order_mark_makes_no_difference(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(FIELDS), encoding=encoding)
    assert read_generation_config(tmp_path).top_k == 20


def test_an_integer_may_be_written_as_a_float(tmp_path: Path) -> None:
    config = read_generation_config(write(tmp_path, {"top_k": 20.0, "max_new_tokens": 512.0}))
    assert (config.top_k, config.max_new_tokens) == (20, 512)
    assert type(config.top_k) is type(config.max_new_tokens) is int
    with pytest.raises(ConfigError, match="top_k must be an integer"):
        read_generation_config(write(tmp_path, {"top_k": 20.5}))
