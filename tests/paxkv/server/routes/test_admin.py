"""The operator's routes exist only if they are enabled."""

from paxkv.errors import PaxkvError
from paxkv.server.routes.admin import ADMIN_PATHS
from tests.paxkv.server.fake_engine import NO_TOKENS


def test_they_do_not_exist_unless_enabled(shared_server):
    for path in ADMIN_PATHS:
        assert shared_server.client.get(path).status_code == 404
        assert shared_server.client.post(path).status_code == 404


def test_reset_says_when_blocks_are_in_use(start_server):
    server = start_server(enable_admin=True)
    assert server.client.post("/reset_prefix_cache").json() == {"success": True}
    server.engine.running.add("someone")
    response = server.client.post("/reset_prefix_cache")
    assert response.status_code == 409
    assert "reset_running_requests=true" in response.json()["error"]["message"]
    assert server.client.post("/reset_prefix_cache?reset_running_requests=true").is_success
    assert server.engine.calls[-1] == ("reset_prefix_cache", True)
    response = server.client.post("/reset_prefix_cache?reset_running_requests=yes")
    assert (response.status_code, response.json()["error"]["param"]) == (
        400,
        "reset_running_requests",
    )
    assert server.client.get("/reset_prefix_cache").status_code == 405


def test_miss_is_explained_by_the_request_id_that_the_client_got(start_server):
    server = start_server(enable_admin=True)
    body = {"prompt": ["a", "b"], "max_tokens": 1}
    name = server.client.post("/v1/completions", json=body).headers["x-request-id"]
    path = "/explain_prefix_cache_miss"
    answer = server.client.get(path, params={"request_id": name}).json()
    assert answer["request_id"] == name
    assert [miss["request_id"] for miss in answer["prompts"]] == server.engine.seen_request_ids
    assert answer["prompts"][0]["reason"] == "too_short"
    for params in ({}, {"request_id": "unknown"}):
        response = server.client.get(path, params=params)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "request_id")


def test_the_profile_is_written_to_the_folder_on_the_command_line(start_server):
    server = start_server(enable_admin=True, profile_dir="/somewhere")
    answer = server.client.post("/start_profile")
    assert (answer.status_code, answer.json()) == (200, {"profile_dir": "/somewhere"})
    assert server.client.post("/start_profile").status_code == 409
    assert server.client.post("/stop_profile").status_code == 200
    assert server.client.post("/stop_profile").status_code == 409
    assert server.engine.calls[0] == ("start_profile", "/somewhere")


def test_the_engines_refusal_is_reported(start_server, monkeypatch):
    async def refuse(folder):
        raise PaxkvError("the engine answered: the disk is full")

    server = start_server(enable_admin=True, profile_dir="/somewhere")
    monkeypatch.setattr(server.engine, "start_profile", refuse)
    response = server.client.post("/start_profile")
    assert response.status_code == 409
    assert "the disk is full" in response.json()["error"]["message"]


def test_profile_without_a_folder_is_refused(start_server):
    server = start_server(enable_admin=True)
    response = server.client.post("/start_profile")
    assert response.status_code == 400
    assert "--profile-dir" in response.json()["error"]["message"]
    assert not server.engine.calls


def test_load_is_the_number_of_calls_in_progress(start_server):
    server = start_server()
    assert server.client.get("/load").json() == {"server_load": 0}
    body = {"prompt": ["a", NO_TOKENS], "max_tokens": 3, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body):
        assert server.client.get("/load").json() == {"server_load": 1}
