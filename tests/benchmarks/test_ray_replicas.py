"""How streams end is distinguished; every request ends, even if a replica is killed."""

import importlib.util
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from benchmarks import ray_replicas
from benchmarks.command_line import BenchmarkError
from benchmarks.ray_replicas import send_request

HAS_RAY = importlib.util.find_spec("ray") is not None
ERROR = b'data: {"error":{"message":"gone","type":"server_error","param":null,"code":null}}\n\n'


@pytest.mark.parametrize(
    ("status", "body", "ending"),
    [
        (200, b"data: 1\n\ndata: [DONE]\n\n", "complete"),
        (200, b"data: [DONE]\n\n", "broken"),
        (200, b"data: 1\n\n" + ERROR, "error_events"),
        (200, b"data: 1\n\n", "broken"),
        (200, b"", "broken"),
        (503, ERROR, "refused"),
        (200, None, "broken"),
    ],
)
def test_endings_of_streams(status: int, body: bytes | None, ending: str) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body or b"data: 1\n\n") + (body is None)))
            self.end_headers()
            self.wfile.write(body or b"data: 1\n\n" * (body is None))

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert send_request(server.server_port, [1], 1) == ending
        thread.join()


@pytest.mark.skipif(HAS_RAY, reason="Ray is installed")
def test_without_ray_the_error_names_the_extra(tmp_path) -> None:
    flags = ["--out", str(tmp_path / "rows"), "--log", str(tmp_path / "log")]
    with pytest.raises(BenchmarkError, match="extra `ray`"):
        ray_replicas.main(flags)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_RAY, reason="needs the extra `ray`")
def test_every_request_ends_although_a_replica_is_killed(tmp_path) -> None:
    out = tmp_path / "rows.jsonl"
    flags = ["--cases", "two replicas one killed", "--num-requests", "60"]
    assert ray_replicas.main([*flags, "--out", str(out), "--log", str(tmp_path / "log")]) == 0
    rows = {row["metric"]: row["median"] for row in map(json.loads, out.read_text().splitlines())}
    assert rows["num_complete"] + rows["num_error_events"] == 60
    assert rows["num_refused"] == rows["num_broken"] == rows["num_orphans"] == 0
    assert rows["num_complete"] >= 54
