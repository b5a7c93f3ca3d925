"""The command `llm`: `python check_llm.py URL`; `tests/clients/run.sh` sets both up."""

import importlib.metadata
import os
import subprocess
import sys
import tempfile
from pathlib import Path

QUESTION = "What is 23 + 58?"
MODELS = """
- model_id: demo
  model_name: paxkv-demo
  api_base: {url}/v1
  api_key_name: paxkv
  supports_tools: true
  supports_schema: true
- model_id: demo-text
  model_name: paxkv-demo
  api_base: {url}/v1
  api_key_name: paxkv
  completion: true
"""
SETTINGS = ("-o", "temperature", "0", "-o", "max_tokens", "64")


def run(folder: str, *words: str) -> str:
    command = [sys.executable, "-m", "llm", *words]
    variables = os.environ | {"LLM_USER_PATH": folder}
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 0, words
    return done.stdout.strip()


def main(url: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "extra-openai-models.yaml").write_text(MODELS.format(url=url))
        run(folder, "keys", "set", "paxkv", "--value", "client-key")
        answer = run(folder, "prompt", "-m", "demo", "--no-stream", *SETTINGS, QUESTION)
        assert "81" in answer
        assert run(folder, "prompt", "-m", "demo", *SETTINGS, QUESTION) == answer
        # The conversation goes on.
        assert run(folder, "prompt", "-m", "demo", "-c", *SETTINGS, "What is 7 + 8?")
        text = run(folder, "prompt", "-m", "demo-text", "--no-stream", *SETTINGS, "2 + 2 =")
        assert run(folder, "prompt", "-m", "demo-text", *SETTINGS, "2 + 2 =") == text
        tool = ("--functions", "def add(a: int, b: int) -> int:\n    'Adds.'\n    return a + b")
        with_tool = run(folder, "prompt", "-m", "demo", *tool, *SETTINGS, QUESTION)
        assert with_tool
    version = importlib.metadata.version("llm")
    print(f"ok  llm {version}: {answer!r}, {text!r}, with a tool {with_tool!r}")


if __name__ == "__main__":
    main(sys.argv[1])
