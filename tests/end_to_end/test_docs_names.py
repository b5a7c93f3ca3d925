"""Flags, routes, request fields and metrics that README.md and docs/ name are those that exist."""

import argparse
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

import paxkv.compile
import paxkv.replay
import paxkv.serve
from paxkv.config.server_config import ServerConfig
from paxkv.config.vllm_flags import VLLM_FLAGS
from paxkv.contracts.engine_output import SchedulerStats
from paxkv.contracts.request_output import TokenTotals
from paxkv.entrypoints.cli import chat, generate, run_batch
from paxkv.server.app import create_app
from paxkv.server.metrics.server_metrics import ServerMetrics
from paxkv.server.protocol.openai_protocol import ChatCompletionRequest, CompletionRequest
from tests.end_to_end.doc_examples import PAGES
from tests.end_to_end.real_server import ROOT
from tests.paxkv.server.fake_engine import FakeEngine

TEXTS = {page: (ROOT / page).read_text() for page in PAGES}
# It lists flags and routes of vLLM that do not exist here; test_docs_vllm.py checks them.
OF_VLLM = "docs/guide/coming-from-vllm.md"
OWN_TEXTS = [page for page in TEXTS if page != OF_VLLM]
PARSERS = {
    "serve": paxkv.serve.make_parser,
    "compile": paxkv.compile.make_parser,
    "replay": paxkv.replay.make_parser,
    "generate": generate.make_parser,
    "run-batch": run_batch.make_parser,
    "chat": chat.make_parser,
}
# Programs with flags of their own; benchmarks' are listed by their --help.
OTHER_PROGRAM = re.compile(
    r"^(?:python -m (?:benchmarks|models|pytest|tests)|pytest|pip|curl|openssl)\b"
)
COMMAND = re.compile(
    r"\b(?:paxkv |python -m paxkv\.)(serve|compile|replay|generate|run-batch|chat)\b"
)
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
METRIC = re.compile(r"\b(?:vllm|paxkv):[a-z0-9_]+|\bpaxkv_[a-z_]+_total\b")
ROUTE = re.compile(r"(?:(GET|POST|DELETE) )?(/(?:[a-z_0-9.{}:-]+/?)*)(?:\?.*)?$")
# Not ours: where a proxy puts the server.
OTHER_PATHS = {"/api"}


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    of_vllm = {name for flag in VLLM_FLAGS for name in flag.names}
    return {name for name in parser._option_string_actions if name not in of_vllm}


FLAGS = {name: flags_of(make_parser()) for name, make_parser in PARSERS.items()}


def code_spans(text: str) -> list[str]:
    """Commands of blocks, joined over their lines, and what stands between backticks."""
    spans = []
    for block in re.findall(r"```\w*\n(.*?)```", text, re.S):
        spans += block.replace("\\\n", " ").splitlines()
    prose = re.sub(r"```\w*\n.*?```", "", text, flags=re.S)
    return spans + [span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", prose)]


@pytest.mark.parametrize("page", OWN_TEXTS)
def test_every_flag_exists_in_the_command_it_is_shown_with(page) -> None:
    for span in code_spans(TEXTS[page]):
        # Quoted errors name flags that do not exist, or that are vLLM's.
        if OTHER_PROGRAM.match(span.strip()) or "unknown flag" in span or "vLLM's" in span:
            continue
        command = COMMAND.search(span)
        known = FLAGS[command[1]] if command else set.union(*FLAGS.values())
        unknown = set(FLAG.findall(span)) - known
        assert not unknown, f"{page}: {span!r} has {unknown}"


@pytest.fixture(scope="module")
def routes() -> set[tuple[str, str]]:
    """Method and path of every route, as ("GET", "/health")."""
    config = ServerConfig(
        enable_admin=True, enable_inspector=True, enable_tokenizer_info_endpoint=True
    )
    found = set()
    for route in create_app(FakeEngine(), config).routes:
        path = re.sub(r":\w+}", "}", route.path)
        found |= {(method, path) for method in route.methods if method != "HEAD"}
    return found


def named_routes(text: str) -> set[tuple[str | None, str]]:
    matches = [ROUTE.match(span.strip()) for span in code_spans(text)]
    return {(match[1], match[2]) for match in matches if match and match[2] not in OTHER_PATHS}


@pytest.mark.parametrize("page", OWN_TEXTS)
def test_every_route_that_is_named_exists(page, routes) -> None:
    paths = {path for _, path in routes} | {"/v1"}
    for method, path in named_routes(TEXTS[page]):
        is_known = path in paths if method is None else (method, path) in routes
        assert is_known, f"{page}: {method or ''} {path}"
    for path in re.findall(r"http://127\.0\.0\.1:8000(/[a-z_/0-9]+)", TEXTS[page]):
        assert path in paths, f"{page}: {path}"


def test_serving_lists_every_route(routes) -> None:
    assert routes <= named_routes(TEXTS["docs/guide/serving.md"])


@pytest.fixture(scope="module")
def metrics() -> str:
    """All metrics of a server that has answered nothing yet, and counts experts and drafts."""
    metrics = ServerMetrics("model", cache_settings={"block_size": "16"})
    stats = SchedulerStats(expert_tokens={0: (0, 0)}, num_accepted_per_pos=(0, 0))
    return metrics.render(stats, TokenTotals()).decode()


def metric_names(metrics: str) -> set[str]:
    """As dashboards write them: a counter with its `_total`, a histogram without a suffix."""
    families = [f for f in text_string_to_metric_families(metrics) if f.samples]
    names = {f"{f.name}_total" if f.type == "counter" else f.name for f in families}
    # When each began, which Prometheus' client adds.
    return {name for name in names if not name.endswith("_created")}


def test_metrics_page_lists_every_metric(metrics) -> None:
    listed = set(re.findall(r"`([a-z0-9_:]+)`", TEXTS["docs/guide/metrics.md"]))
    names = metric_names(metrics)
    assert len(names) > 50
    assert sorted(names - listed) == []


@pytest.mark.parametrize("page", TEXTS)
def test_every_metric_that_is_named_exists(page, metrics) -> None:
    names = metric_names(metrics)
    for name in METRIC.findall(TEXTS[page]):
        whole = name.removesuffix("_bucket")
        # "vllm:num_requests" stands for all that begin so.
        is_beginning = name == "vllm:num_requests"
        assert whole in names or is_beginning, f"{page}: {name}"


def test_guide_explains_every_field_of_requests() -> None:
    """The table for users of vLLM lists all fields and explains none, so it does not count."""
    code = "\n".join(span for page in OWN_TEXTS for span in code_spans(TEXTS[page]))
    named = set(re.findall(r"\w+", code))
    for struct in (CompletionRequest, ChatCompletionRequest):
        assert sorted(set(struct.__struct_fields__) - named) == []
