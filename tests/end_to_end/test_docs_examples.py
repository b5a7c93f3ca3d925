"""Examples of README.md and docs/ run: clients' against one demo server, others in slow tests."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from paxkv.config.cache_config import CacheConfig
from paxkv.config.command_line import config_from_arguments
from paxkv.config.engine_config import EngineConfig
from paxkv.config.model_config import ModelConfig
from paxkv.config.parallel_config import ParallelConfig
from paxkv.config.runner_config import RunnerConfig
from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.config.server_config import ServerConfig
from paxkv.entrypoints.cli.arguments import parse_arguments
from paxkv.serve import make_parser
from tests.end_to_end.doc_examples import (
    DOCUMENTED_URL,
    PAGES,
    DocExample,
    command_environment,
    page_examples,
    text_examples,
)
from tests.end_to_end.real_server import ROOT, running_server
from tests.killed_after import killed_after

EXAMPLES = [example for page in PAGES for example in page_examples(page)]
# Of the pages of the guide, which users type from.
MAX_LEFT_OUT_OF_GUIDE = 12
START_TIMEOUT_S = 420
STOP_TIMEOUT_S = 60
# Of one page. The first is below the limit of a test, the second below that of a slow test.
CLIENT_TIMEOUT_S, HEAVY_TIMEOUT_S = 240, 500
# What examples of several pages need, none of which changes an engine's programs.
SERVER_FLAGS = (
    *("--enable-admin", "--reasoning-parser", "qwen3"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
)


def of_kind(*kinds: str) -> list[DocExample]:
    return [example for example in EXAMPLES if example.kind in kinds]


@pytest.fixture(scope="module")
def server():
    with running_server(*SERVER_FLAGS) as running:
        yield running


def write_files(page: str, folder: Path) -> None:
    """What a page expects in the folder: its own files, and the demo model of the clone."""
    (folder / "models" / "demo").mkdir(parents=True)
    (folder / "models" / "demo" / "checkpoint").symlink_to(ROOT / "models" / "demo" / "checkpoint")
    for example in of_kind("file"):
        if example.page == page:
            path = folder / example.file_name
            path.parent.mkdir(exist_ok=True)
            path.write_text(example.text)


@pytest.fixture(scope="module")
def runner() -> Iterator[subprocess.Popen[str]]:
    """`doc_runner.py`, which forks a process for each page."""
    with subprocess.Popen(
        [sys.executable, ROOT / "tests" / "end_to_end" / "doc_runner.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": ""},
    ) as process:
        yield process
        process.stdin.close()


def run_blocks(
    runner: subprocess.Popen[str],
    examples: Sequence[DocExample],
    folder: Path,
    url: str | None,
    *,
    limit_s: int,
) -> None:
    """Runs them in one process, and compares what they print with what the page says."""
    blocks = []
    for example in examples:
        text = example.text if url is None else example.text.replace(DOCUMENTED_URL, url)
        blocks.append((example.language, text))
    print(
        json.dumps([str(folder), command_environment(folder), blocks, limit_s]),
        file=runner.stdin,
        flush=True,
    )
    # The runner itself ends a page that takes too long.
    with killed_after(limit_s + 30, runner):
        results = json.loads(runner.stdout.readline())
    assert results is not None, f"the process of the page failed, or took {limit_s} s"
    for example, (printed, error) in zip(examples, results, strict=True):
        assert error is None, f"{example.name}: {error}"
        if example.output is not None:
            assert printed == example.output, example.name


@pytest.mark.parametrize("page", sorted({example.page for example in of_kind("client")}))
def test_client_examples_run_and_print_what_the_page_shows(server, runner, page, tmp_path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl on this machine")
    write_files(page, tmp_path)
    examples = [example for example in of_kind("client") if example.page == page]
    run_blocks(runner, examples, tmp_path, server.url, limit_s=CLIENT_TIMEOUT_S)


@pytest.mark.parametrize("example", of_kind("serve"), ids=lambda example: example.name)
def test_flags_of_servers_that_pages_start_fit_each_other(example, tmp_path, monkeypatch) -> None:
    write_files(example.page, tmp_path)
    monkeypatch.chdir(tmp_path)
    variables, arguments = example.serve_arguments
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    namespace = parse_arguments(make_parser(), arguments)
    EngineConfig(
        model=config_from_arguments(ModelConfig, namespace),
        cache=config_from_arguments(CacheConfig, namespace),
        scheduler=config_from_arguments(SchedulerConfig, namespace),
        runner=config_from_arguments(RunnerConfig, namespace),
        parallel=config_from_arguments(ParallelConfig, namespace),
    )
    config_from_arguments(ServerConfig, namespace)


def test_every_block_is_run_or_says_why_not() -> None:
    assert [f"{example.name}: {example.reason}" for example in of_kind("unmarked")] == []
    assert all(len(example.reason) > 10 for example in of_kind("left out"))


def test_few_blocks_of_the_guide_are_left_out() -> None:
    guide = [example for example in of_kind("left out") if "/guide/" in example.page]
    assert len(guide) <= MAX_LEFT_OUT_OF_GUIDE
    # Finds a reader of blocks that finds none.
    assert len(of_kind("client", "heavy", "serve")) > 30


def test_reader_distinguishes_kinds_of_blocks() -> None:
    text = (
        "```python\nprint(1)\n```\n\n```text\n1\n```\n\nA tree:\n\n```text\na/b\n```\n\n"
        "```bash\npip install x\n```\n\n<!-- not run: it downloads -->\n```bash\ncurl x\n```\n\n"
        "<!-- file: a.toml -->\n```toml\nx = 1\n```\n\n```json\n{}\n```\n\n"
        "```bash\npaxkv serve --port 1\n```\n\n```python\nLLM()\n```\n"
    )
    kinds = [(example.kind, example.output) for example in text_examples("page.md", text)]
    assert kinds == [
        ("client", "1\n"),
        ("illustration", None),
        ("unmarked", None),
        ("left out", None),
        ("file", None),
        ("unmarked", None),
        ("serve", None),
        ("heavy", None),
    ]


# Minutes: models are loaded and compiled. `pytest -m slow tests/end_to_end/test_docs_examples.py`
@pytest.mark.slow
@pytest.mark.parametrize("page", sorted({example.page for example in of_kind("heavy")}))
def test_examples_without_a_server_run(runner, page, tmp_path) -> None:
    write_files(page, tmp_path)
    examples = [example for example in of_kind("heavy") if example.page == page]
    run_blocks(runner, examples, tmp_path, None, limit_s=HEAVY_TIMEOUT_S)


# The same: each server compiles what its settings need.
@pytest.mark.slow
@pytest.mark.parametrize("page", sorted({example.page for example in of_kind("serve")}))
def test_servers_that_pages_start_get_ready_and_end(page, tmp_path) -> None:
    write_files(page, tmp_path)
    environment = command_environment(tmp_path)
    for example in of_kind("serve"):
        if example.page != page:
            continue
        script = ["bash", "-euo", "pipefail", "-c", example.serve_script]
        process = subprocess.Popen(
            script, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
        )
        try:
            with killed_after(START_TIMEOUT_S, process):
                assert any(" is ready at " in line for line in process.stdout), example.name
            process.send_signal(signal.SIGTERM)
            assert process.wait(STOP_TIMEOUT_S) == 0, example.name
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
