"""The load generator as a command, with a server of known delays and with paxkv's server."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.serve.__main__ import main
from benchmarks.serve.command_line import make_parser
from paxkv.config.engine_config import ServerConfig
from tests.benchmarks.serve.fake_completions_server import MODEL, running_fake_server
from tests.paxkv.server.conftest import HELD_S, run_server
from tests.paxkv.server.fake_engine import FakeEngine


def rows_of(file: Path) -> dict[str, dict]:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return {row["metric"]: row for row in rows}


def test_report_and_rows_show_the_servers_delays(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a secret")
    out = tmp_path / "rows.jsonl"
    with running_fake_server(first_delay_s=0.1, gap_s=0.01) as fake:
        command = ["--base-url", fake.url, "--num-prompts", "8", "--random-output-len", "5"]
        command += ["--request-rate", "100", "--goodput", "ttft:10000", "tpot:10000"]
        command += ["--num-repetitions", "2", "--out", str(out)]
        assert main([*command, "--save-requests", str(tmp_path / "requests.jsonl")]) == 0
    rows = rows_of(out)
    assert rows["ttft_ms_p50"]["min"] >= 100
    assert rows["e2e_ms_p50"]["min"] >= 140
    # The time to the first token is not an inter-token latency: five tokens have four of them.
    in_tokens_ms = rows["ttft_ms_mean"]["median"] + 4 * rows["itl_ms_mean"]["median"]
    assert rows["itl_ms_mean"]["median"] > 0
    assert in_tokens_ms <= rows["e2e_ms_mean"]["median"] + 0.01
    assert rows["ttft_ms_p50"]["num_repetitions"] == 2
    assert rows["num_output_tokens"]["median"] == 40
    assert rows["goodput_percent"]["median"] == 100
    assert f"model={MODEL}" in rows["ttft_ms_p50"]["case"]
    printed = capsys.readouterr().out
    assert len((tmp_path / "requests.jsonl").read_text().splitlines()) == 16
    # Two warm-up requests per repetition, with different prompts.
    prompts = {tuple(body["prompt"]) for body in fake.bodies}
    assert len(fake.bodies) == len(prompts) == 2 * (2 + 8)
    assert set(fake.keys) == {"Bearer a secret"}
    assert "a secret" not in out.read_text() + printed


@pytest.mark.parametrize(
    ("keys", "sent"),
    [
        ({}, None),
        ({"VLLM_API_KEY": "v"}, "Bearer v"),
        ({"PAXKV_API_KEY": " p1 , p2", "VLLM_API_KEY": "v", "OPENAI_API_KEY": "o"}, "Bearer p1"),
        ({"PAXKV_API_KEY": "", "VLLM_API_KEY": "v", "OPENAI_API_KEY": "o"}, "Bearer v"),
    ],
)
def test_the_key_of_the_server_is_sent(tmp_path: Path, monkeypatch, keys, sent) -> None:
    for name in ("PAXKV_API_KEY", "VLLM_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, key in keys.items():
        monkeypatch.setenv(name, key)
    with running_fake_server() as fake:
        command = ["--base-url", fake.url, "--num-prompts", "1", "--random-output-len", "2"]
        assert main([*command, "--out", str(tmp_path / "rows")]) == 0
    assert set(fake.keys) == {sent}


def test_paxkvs_own_server_takes_every_request(tmp_path: Path, capsys) -> None:
    """Its routes and streams, with an engine that waits for the first requests."""
    out = tmp_path / "rows.jsonl"
    server_config = ServerConfig(port=0, shutdown_timeout_s=2.0)
    with (
        run_server(FakeEngine(seconds_per_token=HELD_S), server_config) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        answering = pool.submit(server.answer_once_running, 4)
        command = ["--base-url", f"{server.url}/v1", "--token-ids", "97", "250", "--ignore-eos"]
        command += ["--num-prompts", "12", "--max-concurrency", "4", "--random-output-len", "6"]
        command += ["--dataset", "shared-prefix", "--shared-prefix-len", "32"]
        command += ["--num-warmups", "0", "--timeout-s", "60"]
        assert main([*command, "--out", str(out)]) == 0
        answering.result()
    rows = rows_of(out)
    assert rows["num_failed"]["median"] == 0
    assert rows["num_output_tokens"]["median"] == 12 * 6
    assert rows["num_prompt_tokens"]["median"] == 12 * (32 + 128)
    assert server.engine.most_running == 4
    assert all(params.ignore_eos for params in server.engine.seen_params)


@pytest.mark.parametrize(
    "flags",
    [
        ["--goodput", "speed:3"],
        ["--goodput", "ttft:0"],
        ["--request-rate", "nan"],
        ["--max-concurrency", "0"],
        ["--extra-body", "{"],
        ["--base-url", "localhost"],
    ],
)
def test_values_that_mean_nothing_are_refused(flags: list[str], capsys) -> None:
    with pytest.raises(SystemExit):
        make_parser("").parse_args(flags)
    assert flags[0] in capsys.readouterr().err
