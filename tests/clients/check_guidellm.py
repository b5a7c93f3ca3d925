"""The load generator `guidellm`: `python check_guidellm.py URL`; see `tests/clients/run.sh`."""

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TOKENIZER = Path(__file__).parents[2] / "models/demo/checkpoint"
ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
NUM_REQUESTS, NUM_TOKENS = 6, 8


def main(url: str) -> None:
    for route in ROUTES:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.json")
            command = [
                *(sys.executable, "-m", "guidellm", "run", "--disable-console"),
                *("--backend", f"kind=openai_http,target={url},request_format={route}"),
                *("--profile", "kind=concurrent,streams=2"),
                *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
                *("--tokenizer", f"kind=hf_auto,model={TOKENIZER}"),
                *("--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={NUM_TOKENS}"),
                *("--output", f"kind=json,path={report}"),
            ]
            variables = os.environ | {"HF_HUB_OFFLINE": "1"}
            done = subprocess.run(
                command, env=variables, capture_output=True, text=True, timeout=300
            )
            assert done.returncode == 0, done.stderr[-2000:]
            (benchmark,) = json.loads(report.read_text())["benchmarks"]
        totals = benchmark["metrics"]["request_totals"]
        assert (totals["successful"], totals["errored"]) == (NUM_REQUESTS, 0), totals
        tokens = benchmark["metrics"]["output_token_count"]["successful"]["mean"]
        assert tokens == NUM_TOKENS, tokens
        version = importlib.metadata.version("guidellm")
        print(f"ok  guidellm {version}, {route}: {totals}, {tokens} output tokens")


if __name__ == "__main__":
    main(sys.argv[1])
