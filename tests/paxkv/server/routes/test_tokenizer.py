"""Token ids of texts and of conversations, and back."""

import threading

import pytest

from paxkv.server.routes.tokenizer import TokenizerRoutes
from tests.paxkv.server.fake_engine import BOS

USER = {"role": "user", "content": "a"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def test_every_promised_route_exists():
    paths = {route.path for route in TokenizerRoutes(None, None).routes()}
    assert paths == {"/tokenize", "/detokenize"}


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"prompt": "ab"}, [BOS, 97, 98]),
        ({"prompt": "ab", "add_special_tokens": False}, [97, 98]),
        ({"prompt": ""}, [BOS]),
        ({"messages": [{"role": "user", "content": "a"}]}, list(b"<user>a<assistant>")),
        (
            {
                "messages": [{"role": "user", "content": "a"}],
                "add_generation_prompt": False,
                "chat_template_kwargs": {"tail": "<t>"},
                "tools": [],
                "return_token_strs": None,
            },
            list(b"<user>a<t>"),
        ),
        (
            {"messages": [USER], "tools": [TOOL], "add_generation_prompt": False},
            list(b"<tool>f<user>a"),
        ),
    ],
)
def test_tokenize(shared_server, fields, tokens):
    body = shared_server.client.post("/tokenize", json=fields).json()
    assert body == {
        "count": len(tokens),
        "max_model_len": 512,
        "tokens": tokens,
        "token_strs": None,
    }


def test_tokens_are_returned_with_their_names(shared_server):
    fields = {"prompt": "ab", "return_token_strs": True}
    body = shared_server.client.post("/tokenize", json=fields).json()
    assert body["token_strs"] == ["<256>", "<97>", "<98>"]


def test_token_names_are_made_outside_of_the_event_loop(shared_server, monkeypatch):
    loop_threads, name_threads = set(), set()

    def id_to_token(token_id):
        name_threads.add(threading.get_ident())
        return "x"

    tokenizer = shared_server.engine.tokenizer
    monkeypatch.setattr(tokenizer, "id_to_token", id_to_token)
    monkeypatch.setattr(
        "paxkv.server.routes.tokenizer.check_model",
        lambda *_: loop_threads.add(threading.get_ident()),
    )
    fields = {"prompt": "ab", "return_token_strs": True}
    assert shared_server.client.post("/tokenize", json=fields).json()["token_strs"] == ["x"] * 3
    assert loop_threads and name_threads
    assert not loop_threads & name_threads


def test_a_conversation_is_tokenized_as_its_chat_would_be(start_server):
    server = start_server(trust_request_chat_template=True)
    source = "{{ tools | length }}{{ x }}{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    fields = {
        "messages": [USER, {"role": "assistant", "content": "b"}],
        "tools": [TOOL],
        "chat_template": source,
        "chat_template_kwargs": {"x": "yz"},
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    body = server.client.post("/tokenize", json=fields).json()
    assert bytes(body["tokens"]) == b"1yz[a][b"
    # Without a tool that may be called, so that the server needs no parser of calls.
    server.client.post("/v1/chat/completions", json=fields | {"tool_choice": "none"})
    assert server.engine.seen_prompts[-1]["prompt"] == "1yz[a][b"


def test_detokenize_shows_special_tokens(shared_server):
    body = shared_server.client.post("/detokenize", json={"tokens": [BOS, 97, 98]}).json()
    assert body == {"prompt": "<s>ab"}


def test_the_first_and_the_last_token_of_the_vocabulary_exist(shared_server):
    response = shared_server.client.post("/detokenize", json={"tokens": [0, 299]})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{}], "tools": [{}]}, "tools[0]"),
        ("/tokenize", {"messages": [{}], "tools": [{"type": "function"}]}, "tools[0]"),
        ("/tokenize", {"messages": [USER], "chat_template": "a"}, "chat_template"),
        (
            "/tokenize",
            {"messages": [USER], "continue_final_message": True},
            "continue_final_message",
        ),
        ("/tokenize", {"prompt": "a", "tools": [TOOL]}, "tools"),
        ("/tokenize", {"prompt": "a", "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [300]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**80]}, "tokens"),
    ],
)
def test_token_routes_name_the_bad_field(shared_server, path, fields, param):
    response = shared_server.client.post(path, json=fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_token_that_does_not_exist_is_named_with_what_is_allowed(shared_server):
    response = shared_server.client.post("/detokenize", json={"tokens": [5, 300]})
    assert response.json()["error"]["message"] == "tokens[1] is 300; token ids are in [0, 300)."


@pytest.mark.parametrize("name", ["mm_processor_kwargs", "media_io_kwargs"])
def test_fields_of_media_are_refused_unless_they_are_empty(shared_server, name):
    for value, status in (({}, 200), ({"image": {}}, 400)):
        response = shared_server.client.post("/tokenize", json={"prompt": "a", name: value})
        assert response.status_code == status
    assert response.json()["error"]["param"] == name
