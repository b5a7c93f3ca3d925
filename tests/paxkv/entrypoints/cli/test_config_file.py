"""A config file becomes the words of a command line."""

import pytest

from paxkv.entrypoints.cli.config_file import read_config_file
from paxkv.errors import ConfigError


def test_each_kind_of_value_becomes_arguments(tmp_path):
    path = tmp_path / "f.json"
    path.write_text(
        '{"a-b": 3, "c_d": true, "e": false, "--f": null, "g": ["x", 1], "h": {"i": [1]},'
        ' "j": ["x"], "k": -5}'
    )
    assert read_config_file(path, json_flags={"--j"}) == [
        "--a-b=3",
        "--c-d",
        "--no-e",
        "--g",
        "x",
        "1",
        '--h={"i": [1]}',
        '--j=["x"]',
        "--k=-5",
    ]


def test_toml_is_recognized_by_its_suffix(tmp_path):
    path = tmp_path / "f.toml"
    path.write_text('host = "::1"\n')
    assert read_config_file(path) == ["--host=::1"]


@pytest.mark.parametrize(
    ("name", "text"),
    [("f.json", '{"port": 1}'), ("f.yaml", "port: 1"), ("f.toml", "port = 1")],
)
def test_byte_order_mark_is_ignored(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8-sig")
    assert read_config_file(path) == ["--port=1"]


@pytest.mark.parametrize("name", ["f.yaml", "f.yml"])
def test_yaml_is_read_like_vllms_config_files(tmp_path, name):
    path = tmp_path / name
    path.write_text(
        "# as of `vllm serve --config`\n"
        "model: org/name\nport: 6379\nmax_num_seqs: 32\nenable-prefix-caching: false\n"
        "uvicorn-log-level: info\nserved-model-name:\n  - a\n  - b\n"
        "compilation-config: {level: 3}\n"
    )
    assert read_config_file(path) == [
        "--model=org/name",
        "--port=6379",
        "--max-num-seqs=32",
        "--no-enable-prefix-caching",
        "--uvicorn-log-level=info",
        *("--served-model-name", "a", "b"),
        '--compilation-config={"level": 3}',
    ]


def test_only_known_flags_are_omitted_if_they_have_no_value(tmp_path):
    path = tmp_path / "f.yaml"
    path.write_text("port:\nprot:\n")
    assert read_config_file(path, known_flags={"--port"}) == ["--prot"]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("f.ini", "a: 1", "reads .yaml, .yml, .toml, .json"),
        ("f.yaml", "- a", "must contain a table"),
        ("f.yaml", "8000: a", "names as keys"),
        ("f.yaml", "", "must contain a table"),
        ("f.yaml", "a: [", "cannot read"),
        ("f.yaml", "port: 1\nport: 2", "occurs twice"),
        ("f.yaml", "a: !!python/object/apply:os.getcwd []", "cannot read"),
        ("f.json", "[1]", "must contain a table"),
        ("f.json", "{", "cannot read"),
        ("f.json", "[" * 100_000, "cannot read"),
        ("f.yaml", "[" * 800, "cannot read"),
        ("f.toml", "a=" + "[" * 100_000, "cannot read"),
        ("f.toml", "a", "cannot read"),
        ("f.json", None, "cannot read"),
        ("f.json", b"\xff", "cannot read"),
    ],
)
def test_file_without_a_table_of_flags_is_an_error(tmp_path, name, text, words):
    path = tmp_path / name
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=words):
        read_config_file(path)
