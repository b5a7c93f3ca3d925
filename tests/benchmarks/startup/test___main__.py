"""Milestones are read from what the server prints; a start that fails says what it printed."""

import json
import sys

import pytest

from benchmarks.startup import __main__ as startup

# Prints as the server does, in the same order, and answers one request over HTTP.
FAKE_SERVER = """
import http.server, os, sys
from pathlib import Path

class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'data: {"choices": []}')

def say(line, end="\\n"):
    print(line, file=sys.stderr, end=end, flush=True)

cache = Path(os.environ["XDG_CACHE_HOME"]) / "programs"
num_loaded = 7 * cache.exists()
cache.touch()
say("INFO paxkv.entrypoints.build: KV cache: 65 blocks of 16 tokens")
say("compiling programs: 3/7", end="\\r")
say(f"INFO x: programs: {num_loaded} loaded from {cache}, {7 - num_loaded} compiled, in 0.1 s")
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(f"paxkv is ready at http://127.0.0.1:{server.server_address[1]}/v1", flush=True)
server.serve_forever()
"""


def test_milestones_come_in_order_and_only_the_first_start_compiles(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(startup, "SERVE_COMMAND", (sys.executable, "-c", FAKE_SERVER))
    monkeypatch.setattr(startup, "_IMPORT", "pass")
    out = tmp_path / "rows.jsonl"
    assert startup.main(["--num-repetitions", "2", "--out", str(out), "--", "--seed", "3"]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    for start, num_loaded in (("cold", 0), ("warm", 7)):
        figures = {r["metric"]: r for r in rows if r["case"] == f"start={start} flags=--seed 3"}
        times_s = [figures[f"{name.replace(' ', '_')}_s"]["median"] for name in startup.MILESTONES]
        assert times_s == sorted(times_s) and times_s[0] > 0
        assert figures["num_loaded"]["median"] == num_loaded
        assert figures["num_compiled"]["median"] == 7 - num_loaded
        assert figures["ready_s"]["num_repetitions"] == 2
    server = "print('no such model'); raise SystemExit(3)"
    monkeypatch.setattr(startup, "SERVE_COMMAND", (sys.executable, "-c", server))
    with pytest.raises(startup.StartError, match="code 3(.|\n)*no such model"):
        startup.measure_start([], tmp_path, timeout_s=60)
