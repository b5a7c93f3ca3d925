"""The tables of docs/guide/coming-from-vllm.md match the code and leave nothing out."""

import argparse
import dataclasses
import functools
import re

import pytest

import paxkv.serve
from docs import generate_vllm_tables as generator
from paxkv.config.sampling_params import SamplingParams
from paxkv.config.vllm_flags import VLLM_FLAGS
from paxkv.entrypoints.cli.arguments import parse_arguments
from paxkv.llm import LLM

TEXT = generator.PAGE.read_text()
ALL_FLAGS = sorted({n for v in generator.VERSIONS for n in generator.vllm_flags(v)})
OF_TABLE = {name: flag for flag in VLLM_FLAGS for name in flag.names}
# Values of flags whose type does not say enough.
SAMPLE_VALUES = {"JSON_LIST": '["a"]', "JSON_OBJECT": "{}", "INT": "2", "FLOAT": "0.5"}


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return paxkv.serve.make_parser()


def verdicts_below(heading: str) -> dict[str, str]:
    """First and second cell of the rows of a section's last table."""
    section = re.split(r"^#+ ", TEXT.partition(f"\n{heading}\n")[2], flags=re.M)[0]
    table = [part for part in section.strip().split("\n\n") if part.startswith("|")][-1]
    rows = [line.strip("|").split("|") for line in table.splitlines()[2:]]
    return {row[0].strip().strip("`"): row[1].strip() for row in rows}


@functools.cache
def flags_below(heading: str) -> list[str]:
    """All flags in the first column of the table of a section."""
    section = re.split(r"^#+ ", TEXT.partition(f"\n{heading}\n")[2], flags=re.M)[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return re.findall(r"`(-[\w-]+)`", " ".join(cells))


def parse(
    parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture, *words: str
) -> tuple[str, str]:
    """What becomes of a command line: "accepted", "warned" or "refused"; and what is said."""
    capsys.readouterr()
    try:
        parse_arguments(parser, words)
    except SystemExit as end:
        assert end.code == 2
        return "refused", capsys.readouterr().err
    said = capsys.readouterr().err
    return ("warned" if said else "accepted"), said


def test_tables_are_up_to_date() -> None:
    updated = generator.updated_page(TEXT)
    assert updated == TEXT, "run: python -m docs.generate_vllm_tables"


def test_lists_of_names_are_whole() -> None:
    assert len(generator.vllm_flags("0.16")) == 213
    assert len(generator.vllm_routes("0.16")) == 50
    assert set(generator.vllm_fields("0.16")) == {e.vllm_class for e in generator.ENDPOINTS}


def test_every_flag_of_vllm_is_in_the_flag_tables_once() -> None:
    headings = ("### Same", "### Accepted with a warning", "### Refused")
    listed = [flag for heading in headings for flag in flags_below(heading)]
    assert [flag for flag in ALL_FLAGS if listed.count(flag) != 1] == []


@pytest.mark.parametrize("name", [name for name in ALL_FLAGS if name not in OF_TABLE])
def test_flag_that_is_the_same_is_read(
    name: str,
    parser: argparse.ArgumentParser,
    capsys: pytest.CaptureFixture,
    tmp_path: pytest.TempPathFactory,
) -> None:
    assert name in flags_below("### Same")
    action = parser._option_string_actions[name]
    if name == "--help":
        return
    if isinstance(action, argparse.BooleanOptionalAction):
        for form in (name, name.replace("--", "--no-", 1)):
            assert parse(parser, capsys, form) == ("accepted", "")
        return
    value = action.choices[0] if action.choices else SAMPLE_VALUES.get(action.metavar, "a")
    if name == "--config":
        path = tmp_path / "flags.json"
        path.write_text("{}")
        value = str(path)
    assert parse(parser, capsys, name, value) == ("accepted", "")
    spelled = name.replace("-", "_").replace("__", "--", 1)
    assert parse(parser, capsys, f"{spelled}={value}") == ("accepted", "")


@pytest.mark.parametrize("name", [name for name in ALL_FLAGS if name in OF_TABLE])
def test_flag_that_paxkv_does_not_have_has_the_fate_that_the_table_says(
    name: str, parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture
) -> None:
    flag = OF_TABLE[name]
    heading, fate = {
        False: ("### Accepted with a warning", "warned"),
        True: ("### Refused", "refused"),
    }[flag.is_refused]
    assert name in flags_below(heading)
    if flag.num_values == 0:
        for is_on, form in ((True, name), (False, name.replace("--", "--no-", 1))):
            wanted = "accepted" if is_on in flag.neutral else fate
            found, said = parse(parser, capsys, form)
            assert (form, found, flag.reason in said) == (form, wanted, wanted != "accepted")
        return
    for value in generator.accepted_values(flag):
        value = "" if value == '""' else value
        assert parse(parser, capsys, f"{name}={value}") == ("accepted", "")
    assert parse(parser, capsys, f"{name}=None") == ("accepted", "")
    found, said = parse(parser, capsys, name, "no-such-value")
    assert (found, flag.reason in said) == (fate, True)


def test_generator_refuses_a_page_without_markers() -> None:
    with pytest.raises(ValueError, match="must contain"):
        generator.updated_page("# A page\n")


@pytest.mark.parametrize("endpoint", generator.ENDPOINTS, ids=lambda e: e.path)
def test_no_field_of_vllm_is_ignored(endpoint: generator.Endpoint) -> None:
    for version in generator.VERSIONS:
        fields = generator.vllm_fields(version)[endpoint.vllm_class]
        verdicts = {name: generator.field_verdict(name, endpoint) for name in fields}
        assert set(verdicts.values()) <= {"same", "refused", "warning"}, verdicts


def test_every_missing_route_has_a_reason() -> None:
    verdicts, notes = generator.route_verdicts(), generator.notes("routes")
    missing = {route for route, verdict in verdicts.items() if verdict == "missing"}
    assert sorted(missing - set(notes)) == []
    assert sorted(set(notes) - set(verdicts)) == []
    assert verdicts["GET /tokenizer_info"] == "same"


def test_arguments_of_llm_are_known() -> None:
    verdicts = verdicts_below("### Arguments of LLM")
    assert "missing" not in verdicts.values()
    assert verdicts["pipeline_parallel_size"] == "refused"
    assert verdicts["enforce_eager"] == "warning"
    assert verdicts["tokenizer"] == "same"
    assert verdicts["product_dtype"] == "paxkv only"


def test_methods_of_llm_have_the_verdict_of_the_code() -> None:
    ours = {name for name in vars(LLM) if not name.startswith("_")}
    verdicts = verdicts_below("### Methods of LLM")
    assert {name for name, verdict in verdicts.items() if verdict != "missing"} == ours


def test_fields_of_sampling_params_have_the_verdict_of_the_code() -> None:
    ours = {field.name for field in dataclasses.fields(SamplingParams)}
    verdicts = verdicts_below("### SamplingParams")
    assert {name for name, verdict in verdicts.items() if verdict == "same"} == ours
    assert set(verdicts.values()) == {"same", "missing"}


def test_page_answers_the_first_questions_near_its_top() -> None:
    answers = TEXT.partition("## Change a command line")[0]
    for word in ("0.16", "LoRA", "Tensor", "Images", "quantization", "Speculative"):
        assert word in answers
