"""A server started as a user would start it answers one chat, on CI's second Python too."""

import httpx

from tests.end_to_end.real_server import running_server


def test_the_demo_server_adds_two_numbers_and_ends_when_asked():
    with running_server() as server:
        body = {
            "model": "paxkv-demo",
            "temperature": 0,
            "messages": [{"role": "user", "content": "What is 23 + 58?"}],
        }
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
        assert answer["choices"][0]["message"]["content"] == "23 + 58 = 81"
        assert server.stop() == 0
