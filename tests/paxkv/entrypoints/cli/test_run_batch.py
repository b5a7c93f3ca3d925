"""Every row of a batch file is answered; an error prints one line and leaves whole rows."""

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from paxkv.config.server_config import ServerConfig
from paxkv.entrypoints.cli import run_batch
from paxkv.errors import ConfigError
from tests.paxkv.entrypoints.cli.batch_program import BatchEngine
from tests.paxkv.server.fake_engine import NO_TOKENS

ROOT = Path(__file__).parents[4]
TIMEOUT_S = 120


def line(custom_id, prompt, *, max_tokens=3):
    fields = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions"}
    return json.dumps(fields | {"body": {"prompt": prompt, "max_tokens": max_tokens}}) + "\n"


@pytest.fixture
def built(monkeypatch):
    """Arguments of each engine that was built, with the engine."""
    calls = []

    def build(engine_config, server_config, *, show_progress):
        engine = BatchEngine()
        calls.append((engine_config, server_config, engine))
        return engine

    monkeypatch.setattr(run_batch, "build_async_client", build)
    return calls


def read_rows(path):
    text = path.read_text()
    assert text.endswith("\n") or not text
    return {row["custom_id"]: row for row in map(json.loads, text.splitlines())}


def test_every_row_is_answered_including_bad_rows(built, tmp_path, capsys):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(line("a", "x") + "\n  \nwhat?\n" + line("b", "y").rstrip("\n"))
    target.write_text("of another run")
    assert run_batch.main(["-i", str(source), "-o", str(target)]) == 0
    rows = read_rows(target)
    assert set(rows) == {"a", "b", None}
    # Empty lines are not requests, but they count in the line numbers.
    assert "line 4 must be" in rows[None]["error"]["error"]["message"]
    captured = capsys.readouterr()
    assert captured.out == ""
    summary = "paxkv: 2 of 3 requests answered, 1 failed; the rows are in "
    assert captured.err.splitlines()[-1] == f"{summary}{target}."
    assert not built[0][2].is_alive


def test_flags_and_config_file_configure_the_engine(built, tmp_path):
    source, config = tmp_path / "in.jsonl", tmp_path / "flags.yaml"
    source.write_text(line("a", "x"))
    config.write_text(f"input-file: {source}\nmax-num-seqs: 5\ntool-call-parser: hermes\n")
    target = str(tmp_path / "out.jsonl")
    words = ["some/model", "--config", str(config), "--output-file", target, "--block-size", "32"]
    assert run_batch.main(words) == 0
    ((engine_config, server_config, _),) = built
    assert engine_config.model.model == "some/model"
    assert engine_config.cache.block_size == 32
    assert engine_config.scheduler.max_num_seqs == 5
    assert server_config.tool_call_parser == "hermes"


def test_api_keys_are_not_read(built, tmp_path, monkeypatch):
    monkeypatch.setenv("PAXKV_API_KEY", "secret")
    (tmp_path / "in").write_text(line("a", "x"))
    assert run_batch.main(["-i", str(tmp_path / "in"), "-o", str(tmp_path / "out")]) == 0
    assert built[0][1].api_key == ()
    assert read_rows(tmp_path / "out")["a"]["error"] is None


# Settings of the server that decide what a batch answers, or how long its engine may take.
OF_A_BATCH = {
    *("max_body_bytes", "max_engine_restarts", "engine_restart_window_s"),
    *("engine_ready_timeout_s", "execute_model_timeout_s", "disable_log_stats"),
    *("log_stats_interval_s", "trust_request_chat_template", "enable_auto_tool_choice"),
    *("tool_call_parser", "exclude_tools_when_tool_choice_none", "reasoning_parser"),
    *("structured_outputs_config", "enable_force_include_usage", "stream_interval"),
    "default_chat_template_kwargs",
}


def test_each_server_setting_is_a_flag_or_listed_as_omitted():
    """For example, a limit on waiting requests would reject lines of a batch."""
    left_out = set(run_batch._SERVER_ONLY_SETTINGS)
    assert not left_out & OF_A_BATCH
    assert left_out | OF_A_BATCH == {field.name for field in dataclasses.fields(ServerConfig)}


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((), "--output-file (-o) are required"),
        (("-i", "x"), "--output-file (-o) are required"),
        (("-o", "x"), "--output-file (-o) are required"),
        (("-i", "x", "-o", "y", "--api-key", "k"), "unknown flag --api-key"),
    ],
)
def test_usage_error(words, complaint, capsys):
    with pytest.raises(SystemExit) as raised:
        run_batch.main(list(words))
    assert raised.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "target", "complaint"),
    [
        ("nothing", "out", "nothing cannot be read: No such file"),
        (".", "out", ". cannot be read: Is a directory"),
        ("https://a.org/in.jsonl", "out", "is a URL; run-batch reads local files only. Download"),
        ("in", "https://a.org/out", "is a URL; run-batch writes local files only. Write a local"),
        ("in", "no/folder", "no/folder cannot be written: No such file"),
        ("in", "in", "in is the input file, which would be lost"),
        ("in", "./in", "./in is the input file, which would be lost"),
        ("in", "out --block-size 7", "block_size must be"),
    ],
)
def test_invalid_files_are_reported_before_the_engine_is_built(
    built, tmp_path, monkeypatch, capsys, source, target, complaint
):
    monkeypatch.chdir(tmp_path)
    Path("in").write_text(line("a", "x"))
    assert run_batch.main(["-i", source, "-o", *target.split()]) == 1
    captured = capsys.readouterr()
    assert complaint in captured.err
    assert captured.err.startswith("paxkv: error: ") and captured.err.count("\n") == 1
    assert not built and Path("in").read_text() == line("a", "x")


def test_failed_start_keeps_the_old_output(tmp_path, monkeypatch, capsys):
    def build(*_, **__):
        raise ConfigError("no such model")

    monkeypatch.setattr(run_batch, "build_async_client", build)
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text(line("a", "x"))
    target.write_text("of another run")
    assert run_batch.main(["-i", str(source), "-o", str(target)]) == 1
    assert capsys.readouterr().err == "paxkv: error: no such model\n"
    assert target.read_text() == "of another run"


def test_full_disk_prints_one_line_and_closes_the_engine(built, tmp_path, capsys):
    (tmp_path / "in").write_text(line("a", "x") * 3)
    assert run_batch.main(["-i", str(tmp_path / "in"), "-o", "/dev/full"]) == 1
    (complaint,) = [li for li in capsys.readouterr().err.splitlines() if "paxkv: error" in li]
    assert "output file /dev/full cannot be written: No space left on device" in complaint
    assert not built[0][2].is_alive


def test_batch_ends_when_the_engine_ends_for_good(built, tmp_path, monkeypatch, capsys):
    async def wait_until_ended(self):
        return "pulled the plug"

    monkeypatch.setattr(BatchEngine, "wait_until_ended", wait_until_ended)
    (tmp_path / "in").write_text(line("a", NO_TOKENS))
    assert run_batch.main(["-i", str(tmp_path / "in"), "-o", str(tmp_path / "out")]) == 1
    assert "paxkv: error: the engine has ended: pulled the plug" in capsys.readouterr().err
    assert not built[0][2].running


def test_input_and_output_can_be_stdin_and_stdout(built, monkeypatch, capfd):
    text = (line("a", "x") + line("b", "y")).encode()
    monkeypatch.setattr(run_batch.sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text)))
    assert run_batch.main(["-i", "-", "-o", "-"]) == 0
    captured = capfd.readouterr()
    rows = [json.loads(row) for row in captured.out.splitlines()]
    assert {row["custom_id"] for row in rows} == {"a", "b"}
    assert "the rows are in stdout." in captured.err


def test_input_can_be_a_pipe(built, tmp_path, capsys):
    pipe, target = tmp_path / "pipe", tmp_path / "out"
    os.mkfifo(pipe)
    writer = threading.Thread(
        target=pipe.write_text, args=(line("a", "x") + "\n" + line("b", "y"),)
    )
    writer.start()
    assert run_batch.main(["-i", str(pipe), "-o", str(target)]) == 0
    writer.join()
    assert set(read_rows(target)) == {"a", "b"}
    assert "paxkv: 2 of 2 requests answered" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)]
)
def test_signal_closes_the_engine_and_leaves_complete_rows(tmp_path, number, code):
    source, target = tmp_path / "in", tmp_path / "out"
    # More rows than may run at the same time; some of them take long.
    lines = [line(str(i), NO_TOKENS if i % 10 == 9 else "x" * 100) for i in range(200)]
    source.write_text("".join(lines))
    command = [sys.executable, "-m", "tests.paxkv.entrypoints.cli.batch_program"]
    process = subprocess.Popen(
        [*command, "-i", str(source), "-o", str(target)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not (target.exists() and target.read_bytes().count(b"\n") >= 20):
            assert time.monotonic() < deadline_s and process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        _, said = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == code
    assert said.count("the engine was closed") == 1
    assert "Traceback" not in said and "requests answered" not in said
    rows = read_rows(target)
    assert 20 <= len(rows) < 200
    assert all(row["error"] is None for row in rows.values())
