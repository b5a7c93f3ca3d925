"""Writes the tables of docs/guide/coming-from-vllm.md.

The names of vLLM's flags, request fields and routes are in docs/vllm_facts/. What paxkv does with
each comes from its parser, its structs and its routes; docs/vllm_facts/notes.toml adds notes. After
a change of any of these, run it from the root of the clone: `python -m docs.generate_vllm_tables`.
"""

import argparse
import dataclasses
import inspect
import json
import re
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import paxkv.serve
from paxkv.config.cache_config import CacheConfig
from paxkv.config.parallel_config import ParallelConfig
from paxkv.config.runner_config import RunnerConfig
from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.config.server_config import ServerConfig
from paxkv.config.vllm_flags import VLLM_FLAGS, VllmFlag, accepted_values
from paxkv.entrypoints.llm_arguments import llm_flag
from paxkv.llm import LLM
from paxkv.server.app import create_app
from paxkv.server.protocol.anthropic.request import (
    MESSAGES_FIELDS,
    MESSAGES_IGNORED,
    MessagesRequest,
)
from paxkv.server.protocol.openai_protocol import ChatCompletionRequest, CompletionRequest
from paxkv.server.protocol.responses import request as responses_request
from paxkv.server.protocol.responses.request import ResponsesRequest
from paxkv.server.protocol.unsupported_fields import (
    CHAT_FIELDS,
    CHAT_IGNORED,
    COMPLETION_FIELDS,
    REASONS,
    RESPONSES_FIELDS,
    RESPONSES_IGNORED,
    NeutralValues,
)
from tests.paxkv.server.fake_engine import FakeEngine

DOCS = Path(__file__).resolve().parent
FACTS = DOCS / "vllm_facts"
PAGE = DOCS / "guide" / "coming-from-vllm.md"
VERSIONS = ("0.16", "0.32")
# Flags, paths, environment variables and fields in a reason.
_CODE_WORD = re.compile(r"--[a-z-]+|(?:/\w+)+|\b\w+_\w+\b")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A route with a body: what vLLM calls its class, and what paxkv does with its fields."""

    path: str
    vllm_class: str
    read: frozenset[str]
    refused: NeutralValues
    ignored: NeutralValues


ENDPOINTS = (
    Endpoint(
        path="/v1/completions",
        vllm_class="CompletionRequest",
        read=frozenset(CompletionRequest.__struct_fields__),
        refused=COMPLETION_FIELDS,
        ignored={},
    ),
    Endpoint(
        path="/v1/chat/completions",
        vllm_class="ChatCompletionRequest",
        read=frozenset(ChatCompletionRequest.__struct_fields__),
        refused=CHAT_FIELDS,
        ignored=CHAT_IGNORED,
    ),
    Endpoint(
        path="/v1/responses",
        vllm_class="ResponsesRequest",
        read=frozenset({*ResponsesRequest.__struct_fields__, *responses_request._SAME_NAMES}),
        refused=RESPONSES_FIELDS,
        ignored=RESPONSES_IGNORED,
    ),
    Endpoint(
        path="/v1/messages",
        vllm_class="AnthropicMessagesRequest",
        read=frozenset(MessagesRequest.__struct_fields__),
        refused=MESSAGES_FIELDS,
        ignored=MESSAGES_IGNORED,
    ),
)


def vllm_flags(version: str) -> list[str]:
    return (FACTS / f"flags_{version}.txt").read_text().split()


def vllm_fields(version: str) -> dict[str, set[str]]:
    """Fields by class. Names that begin with an underscore are no fields."""
    lines = (FACTS / f"request_fields_{version}.txt").read_text().splitlines()
    named = (line.partition(": ") for line in lines)
    return {c: {f for f in text.split() if not f.startswith("_")} for c, _, text in named}


def vllm_routes(version: str) -> set[str]:
    return set((FACTS / f"routes_{version}.txt").read_text().splitlines())


def notes(section: str) -> dict[str, str]:
    return tomllib.loads((FACTS / "notes.toml").read_text())[section]


def flag_tables() -> str:
    """The tables of flags, one for each verdict."""
    own = {
        name: action
        for name, action in paxkv.serve.make_parser()._option_string_actions.items()
        if action.help is not argparse.SUPPRESS
    }
    of_vllm = sorted({name for version in VERSIONS for name in vllm_flags(version)})
    listed = {name for flag in VLLM_FLAGS for name in flag.names}
    missing = [name for name in of_vllm if name not in own and name not in listed]
    parts = [
        "### Same",
        _paragraph(
            "These flags mean the same as in vLLM. paxkv may accept fewer values, and not every "
            "value works on every device: [Tuning](tuning.md#precision). The default is paxkv's. "
            "If the default column is empty, paxkv derives the value from the model or device, or "
            "the flag is not set."
        ),
        _table("flag | values | default", (_own_row(own[n], n) for n in of_vllm if n in own)),
        "### Accepted with a warning",
        _paragraph(
            "These flags have no effect. paxkv prints a warning with the reason, except for the "
            "values in the second column, which ask for what paxkv does anyway."
        ),
        _flag_table(lambda flag: not flag.is_refused),
        "### Refused",
        _paragraph(
            "The command ends with exit code 2 and the reason, except for the values in the second "
            "column, which paxkv accepts. Some reasons name an alternative."
        ),
        _flag_table(lambda flag: flag.is_refused),
    ]
    if missing:
        parts += [
            "### Missing",
            "paxkv does not know these flags. The command ends with exit code 2 and `unknown "
            "flag`.",
            _paragraph(", ".join(f"`{name}`" for name in missing) + "."),
        ]
    return "\n\n".join(parts)


def field_table() -> str:
    """One row per field, with a verdict for each endpoint."""
    old, new = map(vllm_fields, VERSIONS)
    names = {
        name
        for e in ENDPOINTS
        for name in (*e.read, *e.refused, *e.ignored, *old[e.vllm_class], *new[e.vllm_class])
    }
    head = " | ".join(["field", *(f"`{e.path}`" for e in ENDPOINTS), "note"])
    return _table(
        head,
        (
            [f"`{name}`", *(field_verdict(name, e) for e in ENDPOINTS), _field_note(name)]
            for name in sorted(names)
        ),
    )


def field_verdict(name: str, endpoint: Endpoint) -> str:
    is_vllms = any(name in vllm_fields(version)[endpoint.vllm_class] for version in VERSIONS)
    if name in endpoint.refused:
        return "refused"
    if name in endpoint.ignored:
        return "warning"
    if name in endpoint.read:
        return "same" if is_vllms else "paxkv only"
    return "ignored" if is_vllms else "–"


def route_table() -> str:
    return _table(
        "route | verdict | note",
        (
            [f"`{route}`", verdict, notes("routes").get(route, "")]
            for route, verdict in route_verdicts().items()
        ),
    )


def route_verdicts() -> dict[str, str]:
    """By method and path, ordered by path."""
    config = ServerConfig(
        enable_admin=True, enable_inspector=True, enable_tokenizer_info_endpoint=True
    )
    ours = set()
    for route in create_app(FakeEngine(), config).routes:
        path = re.sub(r":\w+}", "}", route.path)
        ours |= {f"{method} {path}" for method in route.methods if method != "HEAD"}
    of_vllm = {route for version in VERSIONS for route in vllm_routes(version)}
    return {
        route: "missing" if route not in ours else "same" if route in of_vllm else "paxkv only"
        for route in sorted(ours | of_vllm, key=lambda route: route.split()[::-1])
    }


def llm_table() -> str:
    rows = []
    for name, note in notes("llm_arguments").items():
        flag = llm_flag(name)
        accepted = ""
        if flag is not None:
            note = _reason(flag)
            accepted = _codes(map(repr, flag.neutral))
        rows.append([f"`{name}`", llm_verdict(name), accepted, note])
    return _table("argument | verdict | accepted values | note", rows)


def llm_verdict(name: str) -> str:
    """What `LLM` does with an argument of a name; "missing" if it knows none of this name."""
    flag = llm_flag(name)
    if flag is not None:
        return "refused" if flag.is_refused else "warning"
    configs = (CacheConfig, SchedulerConfig, RunnerConfig, ParallelConfig)
    settings = {field.name for config in configs for field in dataclasses.fields(config)}
    if name not in settings | set(inspect.signature(LLM).parameters):
        return "missing"
    vllm_names = {flag for version in VERSIONS for flag in vllm_flags(version)}
    return "same" if f"--{name.replace('_', '-')}" in vllm_names else "paxkv only"


TABLES: Mapping[str, Callable[[], str]] = {
    "flags": flag_tables,
    "fields": field_table,
    "routes": route_table,
    "arguments of LLM": llm_table,
}


def updated_page(text: str) -> str:
    """The page with current tables between its markers.

    Raises:
        ValueError: The page lacks a marker.
    """
    for name, make_table in TABLES.items():
        marker = f"<!-- generated by docs/generate_vllm_tables.py: {name}: "
        before, begin, rest = text.partition(f"{marker}begin -->")
        _, end, after = rest.partition(f"{marker}end -->")
        if not begin or not end:
            raise ValueError(f"{PAGE.name} must contain '{marker}begin -->', and an end after it.")
        text = f"{before}{begin}\n\n{make_table()}\n\n{end}{after}"
    return text


def _own_row(action: argparse.Action, name: str) -> list[str]:
    # Every flag takes `None`.
    choices = [choice for choice in action.choices or () if choice is not None]
    values = _codes(choices) if choices else (action.metavar or "")
    if isinstance(action, argparse.BooleanOptionalAction):
        values = "`on`, `off`"
    return [f"`{name}`", values, _default(action)]


def _default(action: argparse.Action) -> str:
    """A default in the words of a command line; empty where the parser has none to show."""
    default = action.default
    if isinstance(default, bool):
        return "`on`" if default else "`off`"
    if isinstance(default, tuple) and default:
        return f"`{json.dumps(default)}`"
    is_shown = isinstance(default, (int, float, str)) and default != argparse.SUPPRESS
    return f"`{default}`" if is_shown else ""


def _flag_table(is_in: Callable[[VllmFlag], bool]) -> str:
    """Flags that share their reason and accepted values share a row."""
    groups: dict[tuple[str, str], list[str]] = {}
    for flag in filter(is_in, VLLM_FLAGS):
        key = (_codes(accepted_values(flag)), _reason(flag))
        groups.setdefault(key, []).extend(flag.names)
    rows = sorted([_codes(names), accepted, why] for (accepted, why), names in groups.items())
    return _table("flags | accepted values | reason", rows)


def _field_note(name: str) -> str:
    is_new = not any(name in fields for fields in vllm_fields("0.16").values())
    is_vllms = any(name in fields for fields in vllm_fields("0.32").values())
    parts = ["newer than vLLM 0.16"] if is_new and is_vllms else []
    parts += [text for text in (notes("fields").get(name),) if text]
    refused = [endpoint for endpoint in ENDPOINTS if name in endpoint.refused]
    if refused and name in REASONS:
        parts.append(_CODE_WORD.sub(r"`\g<0>`", REASONS[name]))
    neutral = [v for e in ENDPOINTS for v in (e.refused | e.ignored).get(name, ())]
    shown = dict.fromkeys(json.dumps(value) for value in neutral)
    if shown:
        parts.append(f"accepted: {_codes(shown)}")
    return "; ".join(parts)


def _reason(flag: VllmFlag) -> str:
    """The reason, with flags, paths and variables in code font: use `--kernels`."""
    return _CODE_WORD.sub(r"`\g<0>`", flag.reason)


def _codes(values: Iterable[str]) -> str:
    return ", ".join(f"`{value}`" for value in values)


def _paragraph(text: str) -> str:
    return textwrap.fill(text, width=120, break_long_words=False, break_on_hyphens=False)


def _table(head: str, rows: Iterable[list[str]]) -> str:
    num_columns = head.count("|") + 1
    lines = [f"| {head} |", "|" + " --- |" * num_columns]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


if __name__ == "__main__":
    PAGE.write_text(updated_page(PAGE.read_text()))
