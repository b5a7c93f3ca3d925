"""docs/guide/coming-from-vllm.md: its verdicts are those of the code."""

import dataclasses
import importlib.util
import inspect
import json
import re

import pytest

from paxkv.config.engine_config import (
    CacheConfig,
    ParallelConfig,
    RunnerConfig,
    SchedulerConfig,
    ServerConfig,
)
from paxkv.config.sampling_params import SamplingParams
from paxkv.llm import LLM
from paxkv.server.app import create_app
from paxkv.server.protocol import responses_protocol
from paxkv.server.protocol.openai_protocol import ChatCompletionRequest, CompletionRequest
from paxkv.server.protocol.responses_protocol import ResponsesRequest
from paxkv.server.protocol.unsupported_fields import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    RESPONSES_FIELDS,
)
from tests.end_to_end.real_server import ROOT
from tests.paxkv.server.fake_engine import FakeEngine

PAGE = ROOT / "docs" / "guide" / "coming-from-vllm.md"
VLLM = json.loads((ROOT / "docs" / "vllm_0_16.json").read_text())
# Column of the table -> vLLM's class, fields that are read, fields that are refused.
ENDPOINTS = {
    "/v1/completions": (
        "CompletionRequest",
        set(CompletionRequest.__struct_fields__),
        COMPLETION_FIELDS,
    ),
    "/v1/chat/completions": (
        "ChatCompletionRequest",
        set(ChatCompletionRequest.__struct_fields__),
        CHAT_FIELDS,
    ),
    "/v1/responses": (
        "ResponsesRequest",
        {*ResponsesRequest.__struct_fields__, *responses_protocol._SAME_NAMES},
        RESPONSES_FIELDS,
    ),
}


def rows_below(heading: str, text: str) -> list[list[str]]:
    """Cells of the last table of a section, without its head and without code marks."""
    section = re.split(r"^#+ ", text.partition(f"\n{heading}\n")[2], flags=re.M)[0]
    table = section.strip().split("\n\n")
    lines = [part for part in table if part.startswith("|")][-1].splitlines()[2:]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]


def verdicts_below(heading: str) -> dict[str, str]:
    return {row[0]: row[1] for row in rows_below(heading, PAGE.read_text())}


def load_generator():
    path = ROOT / "docs" / "generate_vllm_flags.py"
    spec = importlib.util.spec_from_file_location("generate_vllm_flags", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_flag_tables_are_up_to_date() -> None:
    text = PAGE.read_text()
    assert load_generator().updated_page(text) == text, "run: python docs/generate_vllm_flags.py"


def test_every_flag_of_vllm_is_in_the_flag_tables_once() -> None:
    tables = load_generator().flag_tables()
    listed = re.findall(r"^\| `(--[\w-]+)`", tables, re.M)
    listed += re.findall(r"`(--[\w-]+)`", tables.partition("`unknown flag`.")[2])
    assert len(VLLM["flags"]) > 200
    assert [flag for flag in VLLM["flags"] if listed.count(flag) != 1] == []


def test_generator_refuses_a_page_without_markers() -> None:
    with pytest.raises(ValueError, match="must contain"):
        load_generator().updated_page("# A page\n")


def test_request_fields_have_the_verdict_of_the_code() -> None:
    rows = {row[0]: row[1:4] for row in rows_below("## Request fields", PAGE.read_text())}
    wrong = []
    known = set()
    for column, (name, read, refused) in enumerate(ENDPOINTS.values()):
        of_vllm = set(VLLM["request_fields"][name])
        for field in {*rows, *read, *refused, *of_vllm}:
            if field in read:
                wanted = "same" if field in of_vllm else "paxkv only"
            elif field in refused:
                wanted = "refused"
            else:
                wanted = "ignored" if field in of_vllm else "–"
            known |= {field} if wanted != "–" else set()
            if field not in rows or rows[field][column] != wanted:
                wrong.append((name, field, wanted))
    assert wrong == []
    assert set(rows) == known


def test_routes_have_the_verdict_of_the_code() -> None:
    config = ServerConfig(enable_admin=True, enable_inspector=True)
    ours = set()
    for route in create_app(FakeEngine(), config).routes:
        path = re.sub(r":\w+}", "}", route.path)
        ours |= {f"{method} {path}" for method in route.methods if method != "HEAD"}
    of_vllm = set(VLLM["routes"])
    wanted = {
        route: "missing" if route not in ours else "same" if route in of_vllm else "paxkv only"
        for route in ours | of_vllm
    }
    assert verdicts_below("## Routes") == wanted


def test_arguments_of_llm_have_the_verdict_of_the_code() -> None:
    named = {
        name
        for name, parameter in inspect.signature(LLM).parameters.items()
        if parameter.kind != parameter.VAR_KEYWORD
    }
    configs = (CacheConfig, SchedulerConfig, RunnerConfig, ParallelConfig)
    settings = {field.name for config in configs for field in dataclasses.fields(config)}
    verdicts = verdicts_below("### Arguments of LLM")
    wrong = [
        name
        for name, verdict in verdicts.items()
        if (verdict in ("same", "paxkv only")) != (name in named | settings)
    ]
    assert wrong == []
    assert named <= set(verdicts)


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
    answers = PAGE.read_text().partition("## Change a command line")[0]
    for word in ("0.16", "LoRA", "Tensor", "Images", "quantisation", "Speculative"):
        assert word in answers
