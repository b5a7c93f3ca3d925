"""Command lines are read as in vLLM; errors name what is wrong."""

import argparse

import pytest

from paxkv.config.cache_config import CacheConfig
from paxkv.config.command_line import add_config_flags, config_from_arguments
from paxkv.config.model_config import FIT_MEMORY, ModelConfig
from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.config.server_config import ServerConfig
from paxkv.entrypoints.cli.arguments import add_serve_arguments, parse_arguments


def parse(*words):
    parser = argparse.ArgumentParser(prog="paxkv", allow_abbrev=False)
    for config_class in (ModelConfig, CacheConfig, SchedulerConfig, ServerConfig):
        add_config_flags(parser, config_class)
    add_serve_arguments(parser)
    return parse_arguments(parser, words)


def refused(capsys, *words):
    with pytest.raises(SystemExit) as raised:
        parse(*words)
    assert raised.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ("org/model", "--port", "1"),
        ("--port", "1", "org/model"),
        ("--no-enable-prefix-caching", "org/model", "--port", "1"),
        ("--model", "org/model"),
        ("org/model", "--model", "org/model"),
    ],
)
def test_model_can_be_given_without_its_flag_at_any_place(words):
    assert parse(*words).model == "org/model"


def test_two_models_are_rejected(capsys):
    assert "two models: 'a', and --model 'b'" in refused(capsys, "a", "--model", "b")
    assert "unexpected arguments: 1." in refused(capsys, "a", "b")


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("--max-num-seq", "--max-num-seqs"),
        ("--max_num_sesq", "--max-num-seqs"),
        ("--hots", "--host"),
        ("--ssl-cert-file", "--ssl-certfile"),
        ("--served-model", "--served-model-name"),
    ],
)
def test_error_for_an_unknown_flag_suggests_the_nearest(capsys, word, nearest):
    for words in ((word, "secret"), (f"{word}=secret",)):
        error = refused(capsys, *words)
        assert f"unknown flag {word}: did you mean {nearest}?" in error
        assert "secret" not in error


def test_error_for_a_dissimilar_flag_refers_to_help(capsys):
    # Common words are not enough, because the nearest flag has another meaning.
    for word in ("--zzz", "--max-num-waiting-seqs", "--request-chat-template-kwargs", "--sl"):
        assert f"unknown flag {word}: --help lists" in refused(capsys, word)


def test_ignored_flags_of_vllm_print_a_warning(capsys):
    words = ["--enforce-eager", "--swap-space", "9", "-pp", "1", "--no-enable-log-requests", "m"]
    namespace = parse(*words)
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert errors[0].startswith("paxkv: warning: --enforce-eager has no effect: ")
    assert errors[1].startswith("paxkv: warning: --swap-space has no effect: ")
    assert vars(namespace) == vars(parse("m"))
    assert namespace.model == "m"


def test_vllms_names_of_flags_are_accepted():
    namespace = parse("--scheduling-policy", "priority", "--shutdown-timeout", "7")
    assert config_from_arguments(SchedulerConfig, namespace).policy == "priority"
    assert config_from_arguments(ServerConfig, namespace).shutdown_timeout_s == 7.0


def test_vllms_spellings_of_values_are_accepted():
    assert parse("--dtype", "half").dtype == "float16"
    assert parse("--dtype=float").dtype == "float32"
    for words in (("--max-model-len", "auto"), ("--max-model-len=-1",), ("--max-model-len", "-1")):
        namespace = parse(*words)
        assert config_from_arguments(ModelConfig, namespace).max_model_len == FIT_MEMORY
    assert parse("--max-model-len", "8k").max_model_len == 8000


def test_keys_of_objects_can_be_flags(capsys, tmp_path):
    namespace = parse(
        *("--override-generation-config.temperature", "0.5", "--compilation-config.level", "3"),
        *("m", "--default_chat_template_kwargs.enable_thinking=false", "-O3", "-O.mode", "2"),
    )
    assert namespace.model == "m"
    assert namespace.override_generation_config.temperature == 0.5
    assert namespace.default_chat_template_kwargs.values == {"enable_thinking": False}
    warnings = capsys.readouterr().err
    assert warnings.count("--compilation-config has no effect") == 1
    assert warnings.count("-O has no effect") == 1
    assert "top_k must be an integer" in refused(capsys, "--override-generation-config.top_k", "x")
    flag = "--override-generation-config"
    error = refused(capsys, flag, "{}", f"{flag}.x=1")
    assert "given as a whole and key by key" in error
    path = tmp_path / "f.yaml"
    path.write_text(
        "override_generation-config.top_p: 0.5\ndefault-chat-template-kwargs.a: false\n"
        "default-chat-template-kwargs.b_c.d: text"
    )
    namespace = parse("--config", str(path))
    assert namespace.override_generation_config.top_p == 0.5
    kwargs = namespace.default_chat_template_kwargs.values
    assert kwargs == {"a": False, "b_c": {"d": "text"}}


def test_several_keys_and_origins_are_lists(capsys):
    namespace = parse("--api-key", "a", "b", "--allowed-origins", '["https://a.org"]')
    config = config_from_arguments(ServerConfig, namespace)
    assert (config.api_key, config.allowed_origins) == (("a", "b"), ("https://a.org",))
    assert "expected a JSON list" in refused(capsys, "--allowed-origins", "*")


@pytest.mark.parametrize("flag", ["--allowed-origins", "--override-generation-config"])
def test_too_deeply_nested_json_is_rejected(capsys, flag):
    assert "expected a JSON" in refused(capsys, flag, "[" * 100_000)


@pytest.mark.parametrize("variable", ["PAXKV_API_KEY", "VLLM_API_KEY"])
def test_api_keys_are_read_from_the_environment_and_not_in_the_help(capsys, monkeypatch, variable):
    for name in ("PAXKV_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "geheim1, geheim2,")
    assert config_from_arguments(ServerConfig, parse()).api_key == ("geheim1", "geheim2")
    assert config_from_arguments(ServerConfig, parse("--api-key", "c")).api_key == ("c",)
    with pytest.raises(SystemExit):
        parse("--help")
    text = capsys.readouterr().out
    assert "--api-key KEY [KEY ...]" in text
    assert "geheim" not in text


def test_command_line_overrides_the_config_file(tmp_path):
    path = tmp_path / "serve.toml"
    path.write_text(
        'model = "org/model"\nmax-num-seqs = 32\nenable_prefix_caching = false\n'
        'api-key = ["a", "b"]\nallowed-origins = ["*"]\nkv-cache-metrics-sample = 0.5\n'
    )
    namespace = parse("--config", str(path), "--max-num-seqs", "5")
    assert (namespace.model, namespace.max_num_seqs) == ("org/model", 5)
    assert namespace.kv_cache_metrics_sample == 0.5
    assert not namespace.enable_prefix_caching
    assert (namespace.api_key, namespace.allowed_origins) == (["a", "b"], ["*"])
    assert parse("--config", str(path), "other").model == "other"
    assert parse("--config", str(path), "--max-num-seqs", "64").max_num_seqs == 64


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("max-num-seqs: [1, 2]", "takes one value, got 2"),
        ("chat-template: []", "takes one value, got 0"),
        ("config: other.yaml", "another file"),
    ],
)
def test_value_in_a_config_file_is_not_read_as_another_argument(capsys, tmp_path, text, reason):
    path = tmp_path / "f.yaml"
    path.write_text(text)
    assert reason in refused(capsys, "--config", str(path))


def test_list_of_one_item_is_a_value(tmp_path):
    path = tmp_path / "f.yaml"
    path.write_text("chat-template: [a]\nserved-model-name: b")
    namespace = parse("--config", str(path))
    assert (namespace.chat_template, namespace.served_model_name) == ("a", ["b"])


def test_model_can_have_several_names(tmp_path):
    assert parse("m", "--served-model-name", "a", "b").served_model_name == ["a", "b"]
    path = tmp_path / "f.yaml"
    path.write_text("served-model-name: [a, b]")
    namespace = parse("--config", str(path), "m")
    assert (namespace.model, namespace.served_model_name) == ("m", ["a", "b"])


def test_errors_of_a_config_file_end_the_command(capsys, tmp_path):
    path = tmp_path / "serve.json"
    path.write_text('{"max-num-seq": 1}')
    assert "did you mean --max-num-seqs?" in refused(capsys, "--config", str(path))
    path.write_text('{"max-num-seqs": "many"}')
    assert "such as 8192, 8k (8,000) or 8K (8,192), got 'many'" in refused(
        capsys, "--config", str(path)
    )
    path.write_text('{"pipeline-parallel-size": 2}')
    assert "a part of every layer" in refused(capsys, "--config", str(path))
    assert "cannot read" in refused(capsys, "--config", str(tmp_path / "none.toml"))
