"""The load generator as a command, with paxkv's server and an engine of known delays."""

import json
from pathlib import Path

from benchmarks.serve.__main__ import main
from paxkv.config.server_config import ServerConfig
from tests.paxkv.server.conftest import run_server
from tests.paxkv.server.fake_engine import MODEL_NAME, FakeEngine


def test_report_and_rows_show_the_servers_delays(tmp_path: Path, capsys, monkeypatch) -> None:
    keys = {"PAXKV_API_KEY": " a secret , b", "VLLM_API_KEY": "v", "OPENAI_API_KEY": "o"}
    for name, key in keys.items():
        monkeypatch.setenv(name, key)
    out = tmp_path / "rows.jsonl"
    config = ServerConfig(port=0, shutdown_timeout_s=2.0, api_key=("a secret",))
    engine = FakeEngine(seconds_per_token=0.02)
    with run_server(engine, config) as server:
        command = ["--base-url", f"{server.url}/v1", "--token-ids", "97", "250", "--ignore-eos"]
        command += ["--num-prompts", "8", "--random-output-len", "5", "--num-repetitions", "2"]
        command += ["--dataset", "shared-prefix", "--shared-prefix-len", "32"]
        command += ["--request-rate", "100", "--goodput", "ttft:10000", "tpot:10000"]
        command += ["--save-requests", str(tmp_path / "requests.jsonl"), "--out", str(out)]
        assert main(command) == 0
    rows = {row["metric"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert rows["ttft_ms_p50"]["min"] >= 20
    assert rows["e2e_ms_p50"]["min"] >= 100
    assert rows["ttft_ms_p50"]["num_repetitions"] == 2
    medians = {name: row["median"] for name, row in rows.items()}
    assert (medians["num_output_tokens"], medians["num_prompt_tokens"]) == (8 * 5, 8 * (32 + 128))
    assert (medians["num_failed"], medians["goodput_percent"]) == (0, 100)
    assert f"model={MODEL_NAME}" in rows["ttft_ms_p50"]["case"]
    assert len((tmp_path / "requests.jsonl").read_text().splitlines()) == 16
    # Two warm-up requests per repetition, with different prompts.
    prompts = {tuple(prompt["prompt_token_ids"]) for prompt in engine.seen_prompts}
    assert len(prompts) == len(engine.seen_prompts) == 2 * (2 + 8)
    assert all(params.ignore_eos for params in engine.seen_params)
    assert "a secret" not in out.read_text() + capsys.readouterr().out
