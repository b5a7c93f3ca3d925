"""A table of flags becomes a command line."""

import pytest

from paxkv.cli.config_file import read_config_file
from paxkv.errors import ConfigError


def test_each_kind_of_value_becomes_words(tmp_path):
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


def test_toml_is_read_by_its_name(tmp_path):
    path = tmp_path / "f.toml"
    path.write_text('host = "::1"\n')
    assert read_config_file(path) == ["--host=::1"]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("f.yaml", "a: 1", "reads .toml and .json"),
        ("f.json", "[1]", "must hold a table"),
        ("f.json", "{", "cannot read"),
        ("f.toml", "a", "cannot read"),
        ("f.json", None, "cannot read"),
        ("f.json", b"\xff", "cannot read"),
    ],
)
def test_what_is_no_table_of_flags_is_an_error(tmp_path, name, text, words):
    path = tmp_path / name
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=words):
        read_config_file(path)
