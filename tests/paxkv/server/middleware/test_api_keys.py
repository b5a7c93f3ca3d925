"""No key, no answer; and keys show nowhere."""

import hmac
import re

import openai
import pytest

from paxkv.config.server_config import ServerConfig
from paxkv.server.middleware import api_keys
from tests.paxkv.server.conftest import run_server
from tests.paxkv.server.fake_engine import MODEL_NAME, FakeEngine

KEYS = ("sk-first-secret", "zweites-geheimnis-ü")


@pytest.fixture(scope="module")
def server():
    config = ServerConfig(port=0, api_key=KEYS, enable_admin=True, shutdown_timeout_s=1.0)
    with run_server(FakeEngine(), config) as running:
        yield running


def _get(server, path="/v1/models", authorization=None):
    headers = {} if authorization is None else {"Authorization": authorization}
    return server.client.get(path, headers=headers)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_each_key_is_accepted(server, key, scheme):
    assert _get(server, authorization=f"{scheme} {key}".encode()).status_code == 200


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer sk-first-secre",
        "Bearer sk-first-secrett",
        "Bearer SK-FIRST-SECRET",
        "Basic sk-first-secret",
        "sk-first-secret",
        "Bearer sk-first-secret,zweites-geheimnis-ü".encode(),
    ],
)
def test_a_wrong_key_is_401_in_openais_form(server, authorization):
    response = _get(server, authorization=authorization)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert "secret" not in response.text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models/x", "/%761/models", "/v1"])
def test_all_of_v1_needs_a_key(server, path):
    assert _get(server, path).status_code == 401
    assert server.client.post(path, json={}).status_code == 401


def test_admin_routes_need_a_key_and_probes_do_not(server):
    assert server.client.post("/reset_prefix_cache").status_code == 401
    assert _get(server, "/explain_prefix_cache_miss").status_code == 401
    for path in ("/health", "/ping", "/version", "/metrics", "/load"):
        assert _get(server, path).status_code == 200


def test_the_inspectors_page_is_public_and_its_data_need_a_key(server):
    assert _get(server, "/inspector").status_code == 200
    for path in ("/inspector/events", "/inspector/blocks/1"):
        assert _get(server, path).status_code == 401
    assert server.client.post("/inspector/trace").status_code == 401
    assert _get(server, "/inspector/blocks/1", f"Bearer {KEYS[0]}").status_code == 400


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_anthropics_header_opens_its_own_routes_alone(server, path):
    for key, is_open in ((KEYS[0], True), (KEYS[1], True), ("sk-first-secre", False), ("", False)):
        headers = {"x-api-key": key.encode()}
        assert (server.client.post(path, json={}, headers=headers).status_code == 401) != is_open
        assert server.client.get("/v1/models", headers=headers).status_code == 401
        assert server.client.get("/v1/messages_", headers=headers).status_code == 401
    bearer = {"Authorization": f"Bearer {KEYS[0]}"}
    assert server.client.post(path, json={}, headers=bearer).status_code == 400
    # One right key is enough.
    both = bearer | {"x-api-key": "wrong"}
    assert server.client.post(path, json={}, headers=both).status_code == 400
    refused = server.client.post(path, json={}).json()
    assert refused["error"]["type"] == "authentication_error"
    assert "'x-api-key: KEY'" in refused["error"]["message"]
    assert "x-api-key" not in _get(server).text


def test_openais_client_works_with_and_without_a_key(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEYS[0]) as client:
        assert client.completions.create(model=MODEL_NAME, prompt="a", max_tokens=1)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            client.completions.create(model=MODEL_NAME, prompt="a")


def test_every_key_is_compared_in_constant_time(monkeypatch):
    compared, compare_digest = [], hmac.compare_digest

    def compare(a, b):
        compared.append((a, b))
        return compare_digest(a, b)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    for key in (KEYS[0], "wrong"):
        middleware = api_keys.ApiKeyMiddleware(None, api_keys=KEYS)
        compared.clear()
        middleware._has_key({"headers": [(b"authorization", b"Bearer " + key.encode())]})
        assert len(compared) == 2
        assert {len(digest) for pair in compared for digest in pair} == {32}


def test_keys_are_in_no_log(server, caplog):
    caplog.set_level("DEBUG")
    _get(server, authorization=f"Bearer {KEYS[0]}")
    _get(server, authorization="Bearer another-secret")
    assert "GET /v1/models" in caplog.text
    assert not re.search("secret|geheimnis", caplog.text)
