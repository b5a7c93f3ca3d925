"""The inspector over HTTP: page, feed, block details, traces and access."""

import contextlib
import json
import time

import httpx
import pytest

from paxkv.config.server_config import ServerConfig
from paxkv.inspector.routes import HEADERS
from tests.paxkv.inspector.inspected_server import Traffic, make_client, run_server
from tests.paxkv.inspector.recorded_trace import record

PROMPT = "a prompt that nobody else is to read"


@pytest.fixture(scope="module")
def server():
    engine = make_client(num_blocks=64, step_s=0.002, max_num_seqs=4)
    config = ServerConfig(port=0, inspector_max_trace_bytes=50_000)
    with run_server(engine, config, starts=True) as (url, loop):
        traffic = Traffic(engine, loop)
        with httpx.Client(base_url=url, timeout=60) as client:
            yield client, traffic
        assert not traffic.failures


def events_of(client, count):
    found, name = [], None
    with client.stream("GET", "/inspector/events") as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                found.append((name, json.loads(line.removeprefix("data: "))))
            if len(found) == count:
                return found
    raise AssertionError(f"the feed ended after {found}")


def test_page_and_its_files_have_a_strict_content_security_policy(server):
    client, _ = server
    page = client.get("/inspector")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    named = {part.split('"')[0] for part in page.text.split('"/inspector/page/')[1:]}
    assert {"main.js", "style.css", "icon.svg"} <= named
    script = client.get("/inspector/page/main.js").text
    named |= {part.split('"')[0] for part in script.split('from "./')[1:]}
    for name in named:
        got = client.get(f"/inspector/page/{name}")
        assert (
            got.status_code == 200
            and HEADERS.items() <= {key: got.headers[key] for key in HEADERS}.items()
        )
    assert "http://" not in page.text and "https://" not in page.text
    for name in ("../routes.py", "routes.py", "%2e%2e%2froutes.py", "missing.js"):
        assert client.get(f"/inspector/page/{name}").status_code == 404


def test_page_never_parses_user_text_as_html(server):
    client, _ = server
    for name in ("main.js", "requests.js", "details.js", "tree.js", "log.js", "charts.js"):
        script = client.get(f"/inspector/page/{name}").text
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert word not in script


def test_feed_follows_requests(server):
    client, traffic = server
    traffic.send(PROMPT, 180)
    (hello, first), (snapshot, frame), (delta, change) = events_of(client, 3)
    assert (hello, snapshot, delta) == ("hello", "snapshot", "delta")
    assert first["shows_text"] is False and frame["pool"]["num_blocks"] == 64
    deadline = time.monotonic() + 60
    while not change["running"] and time.monotonic() < deadline:
        if traffic.is_over:
            traffic.send(PROMPT, 180)  # it was over before anybody looked
        change = events_of(client, 3)[2][1]
    assert change["running"]
    assert PROMPT not in json.dumps((first, frame, change))


def test_block_details_omit_tokens_by_default(server):
    client, _ = server
    events_of(client, 2)
    got = client.get("/inspector/blocks/1?holder=0").json()
    assert got["block_id"] == 1 and got["token_ids"] is None and got["texts"] is None
    # Python refuses to make an integer of more than 4,300 digits.
    for path in ("/inspector/blocks/64", "/inspector/blocks/" + "9" * 5000):
        assert client.get(path).status_code == 400
    assert client.get("/inspector/blocks/1?holder=x").status_code == 400
    for path in ("/inspector/blocks/x", "/inspector/blocks/%D9%A3"):
        assert client.get(path).status_code == 404


def test_uploaded_trace_is_returned_as_frames(server, tmp_path):
    client, _ = server
    record(tmp_path / "trace")
    data = (tmp_path / "trace").read_bytes()
    lines = client.post("/inspector/trace", content=data).text.splitlines()
    assert "frame" in json.loads(lines[0]) and json.loads(lines[-1])["end"]["num_requests"] == 6
    junk = client.post("/inspector/trace", content=b"{}\n")
    assert junk.status_code == 400 and "header" in junk.json()["error"]["message"]
    assert client.post("/inspector/trace", content=bytes(50_001)).status_code == 413
    assert client.post("/inspector/trace", content=b"").status_code == 400


def test_requests_of_other_hosts_and_sites_are_rejected(server):
    client, _ = server
    for headers in ({"Host": "attacker.example"}, {"Sec-Fetch-Site": "cross-site"}):
        for path in ("/inspector", "/inspector/events", "/inspector/page/main.js"):
            assert client.get(path, headers=headers).status_code == 403


def test_text_is_shown_if_the_operator_enables_it():
    engine = make_client(num_blocks=64, step_s=0.01, max_num_seqs=4)
    config = ServerConfig(port=0, inspector_show_text=True)
    with (
        run_server(engine, config, starts=True) as (url, loop),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        traffic = Traffic(engine, loop)
        events_of(client, 2)
        traffic.send("find me", 200)
        deadline, found = time.monotonic() + 60, None
        while found is None and time.monotonic() < deadline:
            events_of(client, 2)
            if traffic.is_over:
                traffic.send("find me", 200)  # as above
            blocks = [client.get(f"/inspector/blocks/{i}").json() for i in range(1, 8)]
            texts = ["".join(block["texts"] or ()) for block in blocks]
            found = next((text for text in texts if text == "find"), None)
        assert found == "find"


def test_open_page_does_not_delay_the_shutdown():
    engine = make_client(num_blocks=64, step_s=0.01, max_num_seqs=4)
    with httpx.Client(timeout=60) as client, contextlib.ExitStack() as streams:
        with run_server(engine, ServerConfig(port=0), starts=True) as (url, _):
            events = streams.enter_context(client.stream("GET", f"{url}/inspector/events"))
            lines = events.iter_lines()
            assert next(lines) == "event: hello"
        assert "event: closed" in list(lines)
