"""Flags are the fields of config classes, and a config is built from their values."""

import argparse
import dataclasses
from typing import Literal

import pytest

from paxkv.config.command_line import add_config_flags, config_from_arguments
from paxkv.config.setting import setting
from paxkv.config.structured_outputs_config import StructuredOutputsConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Oven:
    """How the bread is baked."""

    degrees: int = setting("heat in %", 220)
    steam_share: float | None = setting("share of steam", None)
    door_is_open: bool = setting("whether heat gets out", False)
    shelf: Literal["top", "bottom"] = setting("where the bread lies", "top")
    forms: StructuredOutputsConfig = setting("what it looks like", StructuredOutputsConfig())
    lamp: Literal["warm", "cold"] | None = setting("its light", None)
    helpers: tuple[str, ...] = setting("who helps", ())
    smells: tuple[str, ...] = setting("what it smells of", ("bread",), is_json=True)
    num_trays: int = setting("trays of an oven that is not built", 1, is_hidden=True)


def parse(*arguments: str, **flags: object) -> Oven:
    parser = argparse.ArgumentParser()
    add_config_flags(parser, Oven, **flags)
    parser.add_argument("--baker", default="nobody")
    return config_from_arguments(Oven, parser.parse_args(arguments))


def test_a_flag_sets_a_field_of_each_type():
    assert parse() == Oven()
    assert parse("--degrees", "180").degrees == 180
    assert parse("--steam-share", "0.5").steam_share == 0.5
    assert parse("--door-is-open").door_is_open
    assert not parse("--door-is-open", "--no-door-is-open").door_is_open
    assert parse("--shelf", "bottom").shelf == "bottom"
    forms = StructuredOutputsConfig(enable_in_reasoning=True)
    assert parse("--forms", '{"enable_in_reasoning": true}').forms == forms


def test_none_is_the_default_of_every_flag_with_a_value():
    for field in dataclasses.fields(Oven):
        if field.name != "door_is_open":
            assert parse("--" + field.name.replace("_", "-"), "None") == Oven()
    # The last value counts, and a list may contain the word None.
    assert parse("--degrees", "180", "--degrees", "None").degrees == 220
    assert parse("--helpers", "None", "Ann").helpers == ("None", "Ann")
    assert parse("--lamp", "cold").lamp == "cold"


@pytest.mark.parametrize(
    "arguments",
    [
        ("--degrees", "hot"),
        ("--shelf", "middle"),
        ("--lamp", "middle"),
        ("--forms", "{"),
        ("--forms", '{"crust": true}'),
    ],
)
def test_a_value_of_another_type_is_a_usage_error(arguments, capsys):
    with pytest.raises(SystemExit) as raised:
        parse(*arguments)
    assert raised.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_a_field_may_have_no_flag_and_then_has_its_default(capsys):
    assert parse("--degrees", "180", without=("shelf",)) == Oven(degrees=180)
    with pytest.raises(SystemExit):
        parse("--shelf", "bottom", without=("shelf",))
    assert "--shelf" in capsys.readouterr().err


def test_help_shows_fields_defaults_and_class_docstring():
    parser = argparse.ArgumentParser()
    add_config_flags(parser, Oven)
    text = parser.format_help()
    assert "How the bread is baked." in text
    assert "heat in % (default: 220)" in text


def test_a_hidden_flag_is_parsed_but_not_in_the_help():
    parser = argparse.ArgumentParser()
    add_config_flags(parser, Oven)
    assert "trays" not in parser.format_help()
    assert "trays" not in parser.format_usage()
    assert parse("--num-trays", "3").num_trays == 3


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("180", 180),
        ("-3", -3),
        ("8k", 8000),
        ("8K", 8192),
        ("25.6k", 25_600),
        ("1.5m", 1_500_000),
        ("2G", 2 * 2**30),
        ("0", 0),
    ],
)
def test_integers_may_have_vllms_short_forms(text, value):
    assert parse(f"--degrees={text}").degrees == value


@pytest.mark.parametrize("text", ["8kb", "1.5", "1.5K", "0.1234k", "k", "1e3", "", "8 k", "0x10"])
def test_other_forms_of_integers_are_rejected(text, capsys):
    with pytest.raises(SystemExit):
        parse(f"--degrees={text}")
    assert "expected a" in capsys.readouterr().err
