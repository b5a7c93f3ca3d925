"""A conversation is sent with each message, without failed answers."""

import io

import pytest

from paxkv.entrypoints.cli import chat
from paxkv.entrypoints.cli.chat_client import ChatError


class FakeClient:
    """Answers with the number of messages; stores the messages."""

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


def test_each_message_is_sent_with_the_history_until_the_input_ends(run, capsys):
    code, client = run("a\n\n  b \n", "--system-prompt", "s", "--max-tokens", "3")
    assert code == 0
    assert [_contents(seen) for seen in client.seen] == [["s", "a"], ["s", "a", "2 messages", "b"]]
    assert client.seen[0][0] == "first"
    assert client.seen[0][2] == {"max_tokens": 3}
    assert capsys.readouterr().out == "2 messages\n4 messages\n"


@pytest.mark.parametrize("message", ["fail", "stop"])
def test_failed_or_stopped_answer_is_not_in_the_history(run, capsys, message):
    code, client = run(f"{message}\nb\n")
    assert code == 0
    assert _contents(client.seen[1]) == ["b"]
    assert ("no answer" in capsys.readouterr().err) == (message == "fail")


def test_quick_prints_one_answer(run, capsys):
    code, client = run("ignored\n", "-q", "a", "--model-name", "mine", "--temperature", "0")
    assert (code, len(client.seen)) == (0, 1)
    assert client.seen[0][0] == "mine"
    assert client.seen[0][2] == {"temperature": 0.0}
    assert capsys.readouterr().out == "1 messages\n"


def test_failed_quick_answer_has_exit_code_1(run, capsys):
    code, _ = run("", "-q", "fail")
    assert code == 1
    assert "paxkv: error: no answer" in capsys.readouterr().err


def test_api_key_comes_from_the_flag_or_the_environment(run, monkeypatch):
    assert run("")[1].api_key == ""
    monkeypatch.setenv("VLLM_API_KEY", "k0")
    assert run("")[1].api_key == "k0"
    monkeypatch.setenv("PAXKV_API_KEY", "k1,k2")
    assert run("")[1].api_key == "k1"
    assert run("", "--api-key", "k3")[1].api_key == "k3"
