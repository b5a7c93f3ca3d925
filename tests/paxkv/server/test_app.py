"""The whole application: every mistake gets its own answer, and the next request is served."""

import socket
import subprocess
import sys

import openai
import pytest

from paxkv.config.server_config import ServerConfig
from paxkv.errors import ConfigError
from paxkv.server.app import create_app
from tests.paxkv.server.conftest import wait_until
from tests.paxkv.server.fake_engine import (
    DIE_AFTER_3,
    FAIL_AFTER_3,
    MODEL_NAME,
    NO_TOKENS,
    FakeEngine,
)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "hi"}


@pytest.fixture(autouse=True)
def still_serves(request):
    """After each test that uses the shared server, it must answer a good request."""
    yield
    if "shared_server" in request.fixturenames:
        server = request.getfixturevalue("shared_server")
        response = server.client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1})
        assert response.status_code == 200
        assert not server.engine.running


def _error(response):
    """The error, after checking its form."""
    assert response.headers["content-type"] == "application/json"
    assert list(response.json()) == ["error"]
    error = response.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert "Traceback" not in error["message"]
    expected = "server_error" if response.status_code >= 500 else "invalid_request_error"
    assert error["type"] == expected
    return error


def _post_raw(server, content, content_type="application/json", path=COMPLETIONS):
    return server.client.post(path, content=content, headers={"Content-Type": content_type})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not valid JSON"),
        (b'{"prompt": "a"', "not valid JSON"),
        (b'{"prompt": "a"} {}', "not valid JSON"),
        (b'{"prompt": "a", "temperature": NaN}', "finite"),
        (b'{"prompt": "a", "temperature": Infinity}', "finite"),
        (b'{"prompt": "a", "temperature": -Infinity}', "finite"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature must be a number in [0.0, 100.0]"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"prompt": "\\udc00 a"}', "surrogate"),
        (b'{"prompt": "\xed\xa0\x80"}', "UTF-8"),
        (b'{"prompt": "\xff"}', "UTF-8"),
        (b'["prompt"]', "an array"),
        (b'"prompt"', "a string"),
        (b"17", "a number"),
        (b"null", "null"),
        (b"[" * 50_000, "deeply"),
        (b'{"a":' * 19_000, "deeply"),
        (b'{"prompt": "a", "unknown": ' + b"[" * 40_000, "deeply"),
        (b"\x00\x01\x02", "not valid JSON"),
    ],
)
def test_malformed_json_is_400(shared_server, content, words):
    response = _post_raw(shared_server, content)
    assert response.status_code == 400
    assert words in _error(response)["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [[1], ["a"]]}, "prompt"),
        ({"prompt": [300]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**70]}, "prompt"),
        ({"prompt": "a" * 600}, "prompt"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2**80}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 1e30}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": [1]}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"seed": 2**70}, "seed"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": 1}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options"),
        ({"model": 3}, "model"),
        ({"request_id": "x" * 200}, "request_id"),
        ({"n": True}, "n"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"n": 128, "prompt": ["a"] * 9}, "n"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"n": 2, "best_of": 129}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"n": 0, "best_of": 2}, "n"),
        ({"n": -1, "best_of": 2}, "n"),
        ({"best_of": "all"}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 2, "temperature": 0}, "best_of"),
        ({"best_of": 128, "prompt": ["a"] * 9}, "best_of"),
        ({"length_penalty": 2}, "length_penalty"),
        ({"use_beam_search": 1}, "use_beam_search"),
        ({"use_beam_search": True, "n": 11}, "n"),
        ({"use_beam_search": True, "n": 2, "logprobs": 5}, "logprobs"),
        ({"use_beam_search": True, "top_p": 0.5}, "top_p"),
        ({"use_beam_search": True, "stop": "a"}, "stop"),
        ({"use_beam_search": True, "seed": 1}, "seed"),
        ({"use_beam_search": True, "skip_special_tokens": False}, "skip_special_tokens"),
        (
            {"use_beam_search": True, "spaces_between_special_tokens": False},
            "spaces_between_special_tokens",
        ),
        ({"use_beam_search": True, "best_of": 2}, "best_of"),
        ({"use_beam_search": True, "temperature": -1}, "temperature"),
        ({"use_beam_search": True, "length_penalty": "long"}, "length_penalty"),
        ({"echo": "a"}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"stream_interval": 0}, "stream_interval"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": "much"}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"5": "much"}}, "logit_bias"),
        ({"bad_words": [""]}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"structured_outputs": {"json": {}, "thoughts": "maybe"}}, "structured_outputs"),
        ({"response_format": {"type": "json"}}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
    ],
)
def test_bad_completion_field_is_400_and_named(shared_server, fields, param):
    response = shared_server.client.post(COMPLETIONS, json={"prompt": "a"} | fields)
    assert response.status_code == 400
    error = _error(response)
    assert error["param"] == param
    assert len(error["message"]) < 500


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "king", "content": "hi"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [USER | {"name": 3}]}, "messages[0].name"),
        ({"messages": [USER | {"tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"reasoning_effort": "vast"}, "reasoning_effort"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"tools": [TOOL]}, "tool_choice"),  # no tool parser is set
        ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
        ),
        ({"tools": [TOOL, TOOL], "tool_choice": "required"}, "tools"),
        ({"use_beam_search": True}, "max_tokens"),
        ({"use_beam_search": True, "max_tokens": 0}, "max_tokens"),
        (
            {"use_beam_search": True, "max_tokens": 2, "logprobs": True, "top_logprobs": 3},
            "top_logprobs",
        ),
    ],
)
def test_bad_chat_field_is_400_and_named(shared_server, fields, param):
    response = shared_server.client.post(CHAT, json={"messages": [USER]} | fields)
    assert response.status_code == 400
    assert _error(response)["param"] == param


def test_the_message_says_what_was_received_and_what_is_allowed(shared_server):
    response = shared_server.client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": "5"})
    assert _error(response)["message"] == "max_tokens: expected int | null, got str."
    response = shared_server.client.post(COMPLETIONS, json={"max_tokens": 5})
    error = _error(response)
    assert (error["message"], error["param"]) == ("missing required field prompt.", "prompt")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_unknown_model_is_404(shared_server, path):
    body = {"model": "other", "prompt": "a", "messages": [USER], "tokens": [1]}
    response = shared_server.client.post(path, json=body)
    assert response.status_code == 404
    error = _error(response)
    assert (error["param"], error["code"]) == ("model", "model_not_found")


def test_prompt_over_the_context_has_openai_code(shared_server):
    response = shared_server.client.post(COMPLETIONS, json={"prompt": "a" * 600})
    assert _error(response)["code"] == "context_length_exceeded"


def test_openai_client_raises_its_own_errors(shared_server):
    with openai.OpenAI(base_url=f"{shared_server.url}/v1", api_key="none") as client:
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="a")
        with pytest.raises(openai.BadRequestError, match="temperature must be a number"):
            client.completions.create(model=MODEL_NAME, prompt="a", temperature=-1)


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/x-www-form-urlencoded"])
def test_content_type_other_than_json_is_415(shared_server, content_type):
    response = _post_raw(shared_server, b'{"prompt": "a"}', content_type)
    assert response.status_code == 415
    assert "application/json" in _error(response)["message"]


@pytest.mark.parametrize(
    "encodings",
    [
        ["gzip"],
        ["GZIP"],
        ["x-gzip"],
        ["zstd"],
        ["dcb"],
        ["gzip;q=1"],
        ["identity, br"],
        ["identity", "gzip"],
    ],
)
def test_a_compressed_body_is_415(shared_server, encodings):
    headers = [("Content-Encoding", encoding) for encoding in encodings]
    response = shared_server.client.post(COMPLETIONS, json={"prompt": "a"}, headers=headers)
    assert response.status_code == 415
    got = ", ".join(encodings)
    assert f"must be identity or absent, got '{got}'" in _error(response)["message"]


@pytest.mark.parametrize("encodings", [["identity"], [""], ["UTF-8"], ["identity", "utf8"]])
def test_a_plain_body_may_say_how_it_is_encoded(shared_server, encodings):
    headers = [("Content-Encoding", encoding) for encoding in encodings]
    response = shared_server.client.post(COMPLETIONS, json={"prompt": "a"}, headers=headers)
    assert response.status_code == 200


def test_content_type_may_name_its_charset(shared_server):
    response = _post_raw(shared_server, b'{"prompt": "a"}', "Application/JSON; charset=utf-8")
    assert response.status_code == 200


@pytest.mark.parametrize("size", [100_001, 300_000, 3_000_000])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_body_over_the_limit_is_413(shared_server, size, is_chunked):
    content = b'{"prompt": "' + b"a" * (size - 14) + b'"}'
    if is_chunked:
        content = iter([content[i : i + 10_000] for i in range(0, size, 10_000)])
    response = _post_raw(shared_server, content)
    assert response.status_code == 413
    assert "100000 bytes" in _error(response)["message"]


@pytest.mark.parametrize("path", ["/v1", "/v1/completions/x", "/nothing", "/v1/chat"])
def test_unknown_path_is_404(shared_server, path):
    response = shared_server.client.post(path, json={})
    assert response.status_code == 404
    assert path in _error(response)["message"]


@pytest.mark.parametrize(("method", "path"), [("GET", COMPLETIONS), ("POST", "/v1/models")])
def test_wrong_method_is_405(shared_server, method, path):
    response = shared_server.client.request(method, path)
    assert response.status_code == 405
    assert response.headers["allow"]
    assert path in _error(response)["message"]


def test_same_request_id_twice_at_once_is_served_twice(start_server):
    server = start_server(seconds_per_token=0.01)
    body = {"prompt": "a", "max_tokens": 5, "stream": True, "request_id": "same"}
    headers = {"X-Request-Id": "same too"}
    with server.client.stream("POST", COMPLETIONS, json=body, headers=headers) as first:
        second = server.client.post(COMPLETIONS, json=body, headers=headers)
        first.read()
    assert (first.status_code, second.status_code) == (200, 200)
    assert first.text.count('"id":"cmpl-same"') == 5
    assert second.headers["x-request-id"] == "same too"


def test_error_in_the_middle_of_a_stream_is_an_event(start_server, caplog):
    server = start_server()
    body = {"prompt": FAIL_AFTER_3, "stream": True}
    response = server.client.post(COMPLETIONS, json=body)
    assert response.status_code == 200
    events = response.text.split("\n\n")
    assert len(events) == 5
    assert events[3].startswith('data: {"error":{"message":"internal error')
    assert "[DONE]" not in response.text
    assert "secret" not in response.text
    assert "a secret of the inside" in caplog.text
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        stream = client.completions.create(model=MODEL_NAME, prompt=FAIL_AFTER_3, stream=True)
        with pytest.raises(openai.APIError, match="internal error"):
            list(stream)


def test_bug_is_500_without_its_traceback_and_is_logged(start_server, caplog):
    server = start_server()
    response = server.client.post(COMPLETIONS, json={"prompt": FAIL_AFTER_3})
    assert response.status_code == 500
    assert "secret" not in response.text
    assert _error(response)["code"] == "internal_error"
    assert response.headers["connection"] == "close"  # by uvicorn
    # Logged by uvicorn, after the answer has left.
    wait_until(lambda: "a secret of the inside" in caplog.text)
    assert server.client.post(COMPLETIONS, json={"prompt": "a"}).status_code == 200


def test_dead_engine_is_503_everywhere(start_server):
    server = start_server()
    assert server.client.get("/health").status_code == 200
    response = server.client.post(COMPLETIONS, json={"prompt": DIE_AFTER_3, "stream": True})
    assert '{"error":{"message":"the engine has ended' in response.text
    for stream in (False, True):
        response = server.client.post(COMPLETIONS, json={"prompt": "a", "stream": stream})
        assert response.status_code == 503
        assert _error(response)["code"] == "engine_dead"
    response = server.client.get("/health")
    assert response.status_code == 503
    assert "the engine has ended" in _error(response)["message"]
    assert server.client.get("/metrics").status_code == 200
    assert server.client.get("/v1/models").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["a", ["a", "b", "c"], NO_TOKENS])
def test_requests_of_a_client_that_disconnects_are_aborted(start_server, stream, prompt):
    # So slow that no request ends before its client disconnects.
    server = start_server(seconds_per_token=0.2)
    num_prompts = len(prompt) if isinstance(prompt, list) else 1
    request = server.client.build_request(
        "POST", COMPLETIONS, json={"prompt": prompt, "stream": stream, "max_tokens": 400}
    )
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(request.content)}\r\n\r\n"
    )
    with socket.create_connection(server.address) as connection:
        connection.sendall(head.encode() + request.content)
        wait_until(lambda: len(server.engine.running) == num_prompts)
        if stream and prompt != NO_TOKENS:
            assert connection.recv(10).startswith(b"HTTP/1.1 2")
    wait_until(lambda: not server.engine.running)
    assert len(server.engine.aborted) == num_prompts


def test_one_bad_prompt_of_several_aborts_the_others(start_server):
    server = start_server(seconds_per_token=0.02)
    body = {"prompt": [[1], [2], [999]], "max_tokens": 400}
    response = server.client.post(COMPLETIONS, json=body)
    assert response.status_code == 400
    assert not server.engine.running


def test_http_layer_needs_no_jax():
    code = (
        "import sys\n"
        "from paxkv.config.server_config import ServerConfig\n"
        "from paxkv.server.app import create_app\n"
        "import paxkv.server.http_server\n"
        "from tests.paxkv.server.fake_engine import FakeEngine\n"
        "create_app(FakeEngine(), ServerConfig())\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('jax', 'jaxlib', 'flax')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[]"


def test_every_app_has_its_own_metrics():
    # Prometheus' default registry refuses a name that is registered twice.
    create_app(FakeEngine(), ServerConfig())
    create_app(FakeEngine(), ServerConfig())


ORIGIN = {"Origin": "https://a.org"}
PREFLIGHT = ORIGIN | {"Access-Control-Request-Method": "POST"}


def test_web_pages_are_refused_by_default(shared_server):
    response = shared_server.client.options(COMPLETIONS, headers=PREFLIGHT)
    assert response.status_code == 405
    assert "access-control-allow-origin" not in response.headers


def test_only_allowed_origins_may_use_the_server(start_server):
    server = start_server(
        allowed_origins=("https://a.org",),
        allowed_methods=("POST",),
        allowed_headers=("Content-Type", "Authorization"),
        allow_credentials=True,
        api_key=("key",),
    )
    response = server.client.options(COMPLETIONS, headers=PREFLIGHT)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://a.org"
    assert response.headers["access-control-allow-credentials"] == "true"
    other = server.client.options(COMPLETIONS, headers=PREFLIGHT | {"Origin": "https://b.org"})
    assert other.status_code == 400
    # A page can read why it was refused.
    refused = server.client.post(COMPLETIONS, json={}, headers=ORIGIN)
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://a.org"


@pytest.mark.parametrize("front", ["", "/api"])
def test_a_proxy_may_strip_the_root_path_or_keep_it(start_server, front):
    server = start_server(root_path="/api", api_key=("key",))
    assert server.client.get(f"{front}/version").status_code == 200
    assert server.client.get(f"{front}/v1/models").status_code == 401
    headers = {"Authorization": "Bearer key"}
    assert server.client.get(f"{front}/v1/models", headers=headers).status_code == 200
    assert server.client.get(f"/api{front}/api/v1/models", headers=headers).status_code == 404
    error = _error(server.client.get(f"{front}/nothing"))
    assert error["message"] == f"there is nothing at {front}/nothing."


@pytest.mark.parametrize("front", ["", "/api", "//api/"])
def test_an_extra_slash_does_not_bypass_the_key(start_server, front):
    server = start_server(root_path="/api", api_key=("key",), enable_admin=True)
    body, headers = {"prompt": "a"}, {"Authorization": "Bearer key"}
    for path in ("/v1/completions/", "//v1/completions", "/v1//completions//"):
        response = server.client.post(f"{server.url}{front}{path}", json=body)
        assert response.status_code == 401
        response = server.client.post(f"{server.url}{front}{path}", json=body, headers=headers)
        assert response.status_code == 200, response.text
    path = f"{server.url}{front}//reset_prefix_cache/"
    assert server.client.post(path).status_code == 401
    assert server.client.post(path, headers=headers).status_code == 200


def test_no_path_of_the_server_may_be_the_root_path():
    app = create_app(FakeEngine(), ServerConfig(enable_admin=True))
    first_words = {route.path.split("/")[1] for route in app.routes} - {""}
    assert len(first_words) > 10
    for word in first_words:
        with pytest.raises(ConfigError, match=f"a path of the server, got '/{word}'"):
            ServerConfig(root_path=f"/{word}")
        assert ServerConfig(root_path=f"/{word}s/{word}").root_path == f"/{word}s/{word}"


def test_ping_is_health_with_both_methods(start_server):
    server = start_server()
    assert server.client.get("/ping").status_code == server.client.post("/ping").status_code == 200
    server.engine.is_alive = False
    assert server.client.get("/ping").status_code == server.client.post("/ping").status_code == 503
