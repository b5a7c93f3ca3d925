"""A server started as a user would start it: one chat, and its end."""

import json

import httpx
import pytest

from tests.compiler_flags import user_flags
from tests.end_to_end.real_server import running_server
from tests.small_engine import FLAGS

AS_FOR_USERS = {"XLA_FLAGS": user_flags()}
FEW_PROGRAMS = (*FLAGS, "--no-enable-compilation-cache")
# On a busy machine, the last stream may take longer than a server waits by default.
PATIENT = ("--shutdown-timeout-s", "250")


@pytest.mark.parametrize(
    ("flags", "variables"),
    [
        # It loads the programs of all servers of the test run.
        pytest.param((), {}, id="default"),
        # It compiles what it needs, with the flags of XLA that users have. It is one of the tests
        # in `tests/core_tests.txt`.
        pytest.param(FEW_PROGRAMS, AS_FOR_USERS, id="cold", marks=pytest.mark.slow),
    ],
)
def test_the_demo_server_adds_two_numbers_and_ends_after_its_last_stream(flags, variables):
    with running_server(*flags, *PATIENT, variables=variables) as server:
        body = {
            "model": "paxkv-demo",
            "temperature": 0,
            "messages": [{"role": "user", "content": "What is 23 + 58?"}],
        }
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
        assert answer["choices"][0]["message"]["content"] == "23 + 58 = 81"

        long = {
            "prompt": "What is 2 + 2?",
            "max_tokens": 300,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=long, timeout=60
        ) as response:
            lines = (line for line in response.iter_lines() if line)
            events = [next(lines)]
            server.process.terminate()
            events += lines
        assert events.pop() == "data: [DONE]"
        *_, last = (json.loads(event.removeprefix("data: ")) for event in events)
        assert last["usage"]["completion_tokens"] == 300
        assert server.process.wait(250) == 0
