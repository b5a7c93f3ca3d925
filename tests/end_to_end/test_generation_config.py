"""generation_config.json sets the sampling defaults, offline and over HTTP."""

import json
import shutil
import subprocess
import sys

import httpx
import pytest

from paxkv import LLM, SamplingParams
from tests.demo_programs import FLAGS, SETTINGS, demo_programs
from tests.end_to_end.real_server import ROOT, running_server
from tests.engine_compilations import process_engine_compilations

# Nonsense to the model, so that what it draws at temperature 1 is seldom the likeliest token.
PROMPT = "xyz qrst"
FILE = {"eos_token_id": [2, 0], "top_k": 1, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The demo model, which is to draw from one token."""
    folder = tmp_path_factory.mktemp("checkpoint") / "demo"
    shutil.copytree(ROOT / "models" / "demo" / "checkpoint", folder)
    (folder / "generation_config.json").write_text(json.dumps(FILE))
    return folder


@pytest.fixture(scope="module")
def offline(checkpoint):
    """Texts of an engine: greedy, by the file alone, and drawn with another seed."""
    with process_engine_compilations():
        llm = LLM(str(checkpoint), compiled_dir=str(demo_programs()), **SETTINGS)
    with llm:

        def text(params: SamplingParams | None) -> str:
            (output,) = llm.generate([PROMPT], params, use_tqdm=False)
            return output.outputs[0].text

        drawn = SamplingParams(seed=2, max_tokens=12)
        return [
            text(params) for params in (SamplingParams(temperature=0, max_tokens=12), None, drawn)
        ]


def test_an_engine_samples_as_the_file_says_unless_a_request_has_settings(offline) -> None:
    greedy, of_file, drawn = offline
    assert of_file == greedy != drawn


# The tests of routes have such defaults of an engine without a device, and
# `tests/paxkv/entrypoints/test_build.py` has the flag.
@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--generation-config", "vllm")], ids=["auto", "vllm"])
def test_a_server_samples_as_the_file_says_unless_a_request_or_a_flag_says_otherwise(
    checkpoint, offline, flags, tmp_path
) -> None:
    greedy, *_ = offline
    programs = ("--compiled-dir", str(demo_programs()), *FLAGS)
    arguments = ("--model", str(checkpoint), *programs, *flags)
    with (
        open(tmp_path / "log", "wb") as stderr,
        running_server(*arguments, stderr=stderr) as server,
    ):

        def ask(path: str, **body: object) -> dict[str, object]:
            response = httpx.post(f"{server.url}{path}", json={"seed": 2} | body, timeout=60)
            return response.raise_for_status().json()

        def complete(**fields: object) -> str:
            return ask("/v1/completions", prompt=PROMPT, **fields)["choices"][0]["text"]

        is_filtered = not flags
        assert (complete(max_tokens=12) == greedy) is is_filtered
        assert complete(max_tokens=12, top_k=0) != greedy
        assert complete(max_tokens=12, top_k=1) == greedy
        # What the model's file says of the length is a default alone.
        assert complete(max_tokens=30, top_k=1).startswith(greedy)
        assert (complete(top_k=1) == greedy) is is_filtered
        message = {"role": "user", "content": PROMPT}
        chats = [ask("/v1/chat/completions", messages=[message], **k) for k in ({}, {"top_k": 0})]
        likeliest = ask("/v1/chat/completions", messages=[message], temperature=0, max_tokens=12)
        texts = [chat["choices"][0]["message"]["content"] for chat in (*chats, likeliest)]
        assert (texts[0] == texts[2]) is is_filtered
        assert texts[1] != texts[2]
        answer = ask("/v1/responses", input=PROMPT)
        assert (answer["output"][0]["content"][0]["text"] == texts[2]) is is_filtered
        if is_filtered:
            for fields, num_tokens in (({}, 12), ({"max_output_tokens": 20}, 20)):
                answer = ask("/v1/responses", input=PROMPT, ignore_eos=True, **fields)
                assert answer["usage"]["output_tokens"] == num_tokens
    log = (tmp_path / "log").read_text()
    assert log.count("are top_k=1, max_new_tokens=12, from the model's") == is_filtered


# In the normal run, `tests/paxkv/test_compile.py` gives a bad file to `paxkv compile`.
@pytest.mark.slow
def test_a_bad_value_ends_the_start_with_one_line(checkpoint, tmp_path) -> None:
    (tmp_path / "generation_config.json").write_text('{"top_p": 7}')
    command = [sys.executable, "-m", "paxkv.serve", "--model", str(checkpoint), "--port", "0"]
    ended = subprocess.run(
        [*command, "--generation-config", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 1
    last_line = ended.stderr.splitlines()[-1]
    assert last_line.startswith(f"paxkv: error: {tmp_path / 'generation_config.json'}: top_p must")
