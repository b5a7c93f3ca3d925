"""A completions server for tests, with known delays and failures, in threads."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODEL = "fake"
# First tokens of prompts that make the server fail, or send a line separator.
REFUSE, FAIL_MIDWAY, CUT_OFF, SAY_NOTHING, LINE_SEPARATOR = 1, 2, 3, 4, 5


class FakeCompletionsServer(ThreadingHTTPServer):
    """Answers with `max_tokens` tokens. The first answers begin when `num_awaited` requests run."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, **settings: object) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.first_delay_s = self.gap_s = 0.0
        self.tokens_per_piece, self.sends_usage, self.num_awaited = 1, True, 0
        vars(self).update(settings)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"
        self.metrics = ""
        self.bodies: list[dict] = []
        self.keys: list[str | None] = []
        self.num_running = self.most_running = 0
        self.lock = threading.Lock()


class _Handler(BaseHTTPRequestHandler):
    server: FakeCompletionsServer

    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        models = {"data": [{"id": MODEL}, {"id": "another"}]}
        self._answer(200, self.server.metrics if self.path == "/metrics" else json.dumps(models))

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.bodies.append(body)
            server.keys.append(self.headers["Authorization"])
            server.num_running += 1
            server.most_running = max(server.most_running, server.num_running)
        # Clients may close their connections early.
        with contextlib.suppress(ConnectionError):
            self._stream(body)
        with server.lock:
            server.num_running -= 1

    def _stream(self, body: dict) -> None:
        server, order = self.server, body["prompt"][0]
        if order == REFUSE:
            self._answer(503, '{"error": {"message": "too much"}}')
            return
        self._answer(200, "")
        while server.most_running < server.num_awaited:
            time.sleep(0.001)
        num_tokens = 0 if order == SAY_NOTHING else body["max_tokens"]
        for token in range(0, num_tokens, server.tokens_per_piece):
            time.sleep(server.gap_s if token else server.first_delay_s)
            if token and order in (FAIL_MIDWAY, CUT_OFF):
                if order == FAIL_MIDWAY:
                    self._send({"error": {"message": "the engine died"}})
                return
            text = "a\u2028b" if order == LINE_SEPARATOR else "a"
            self._send({"choices": [{"index": 0, "text": text, "finish_reason": None}]})
        self._send({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        if server.sends_usage:
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": num_tokens}
            self._send({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, event: dict) -> None:
        # Not escaped, so that characters which some clients take for the end of a line stay in it.
        self.wfile.write(f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode())

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())


@contextlib.contextmanager
def running_fake_server(**settings: object) -> Iterator[FakeCompletionsServer]:
    """A server on a free loopback port; `url` is its address with the version."""
    with FakeCompletionsServer(**settings) as fake:
        thread = threading.Thread(target=fake.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield fake
        finally:
            fake.shutdown()
            thread.join()
