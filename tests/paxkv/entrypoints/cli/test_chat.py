"""A conversation: what was said goes along, what failed does not."""

import io

import pytest

from paxkv.entrypoints.cli import chat
from paxkv.entrypoints.cli.chat_client import ChatError


class FakeClient:
    """Answers with the number of messages; remembers what it was sent."""

    instances = []

    def __init__(self, url, *, api_key, ca_certs):
        self.url, self.api_key, self.ca_certs = url, api_key, ca_certs
        self.seen = []
        self.instances.append(self)

    def first_model(self):
        return "first"

    def stream(self, model, messages, **params):
        self.seen.append((model, [dict(m) for m in messages], params))
        yield f"{len(messages)} "
        if messages[-1]["content"] == "fail":
            raise ChatError("no answer")
        if messages[-1]["content"] == "stop":
            raise KeyboardInterrupt
        yield "messages"


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(chat, "ChatClient", FakeClient)
    monkeypatch.setattr(FakeClient, "instances", [])
    for variable in ("PAXKV_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(variable, raising=False)

    def call(text, *words):
        monkeypatch.setattr(chat.sys, "stdin", io.StringIO(text))
        return chat.main(words), FakeClient.instances[-1]

    return call


def _contents(seen):
    return [message["content"] for message in seen[1]]


def test_history_goes_along_and_the_end_of_input_ends_it(run, capsys):
    code, client = run("a\n\n  b \n", "--system-prompt", "s", "--max-tokens", "3")
    assert code == 0
    assert [_contents(seen) for seen in client.seen] == [["s", "a"], ["s", "a", "2 messages", "b"]]
    assert client.seen[0][0] == "first"
    assert client.seen[0][2] == {"max_tokens": 3}
    assert capsys.readouterr().out == "2 messages\n4 messages\n"


@pytest.mark.parametrize("message", ["fail", "stop"])
def test_answer_that_failed_or_was_stopped_is_no_part_of_what_follows(run, capsys, message):
    code, client = run(f"{message}\nb\n")
    assert code == 0
    assert _contents(client.seen[1]) == ["b"]
    assert ("no answer" in capsys.readouterr().err) == (message == "fail")


def test_quick_is_one_answer(run, capsys):
    code, client = run("ignored\n", "-q", "a", "--model-name", "mine", "--temperature", "0")
    assert (code, len(client.seen)) == (0, 1)
    assert client.seen[0][0] == "mine"
    assert client.seen[0][2] == {"temperature": 0.0}
    assert capsys.readouterr().out == "1 messages\n"


def test_quick_one_that_fails_is_exit_code_1(run, capsys):
    code, _ = run("", "-q", "fail")
    assert code == 1
    assert "paxkv: error: no answer" in capsys.readouterr().err


def test_key_comes_from_the_flag_or_the_servers_variables(run, monkeypatch):
    assert run("")[1].api_key == ""
    monkeypatch.setenv("VLLM_API_KEY", "k0")
    assert run("")[1].api_key == "k0"
    monkeypatch.setenv("PAXKV_API_KEY", "k1,k2")
    assert run("")[1].api_key == "k1"
    assert run("", "--api-key", "k3")[1].api_key == "k3"
