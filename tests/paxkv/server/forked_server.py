"""A process with a server over the fake engine. Tests send signals to it."""

import asyncio
import sys
import threading
from collections.abc import Sequence

from paxkv.config.server_config import ServerConfig
from paxkv.server.app import create_app
from paxkv.server.http_server import HttpServer, bind_socket, socket_url
from tests.paxkv.forked_processes import serve_forks
from tests.paxkv.server.fake_engine import FakeEngine


def main(arguments: Sequence[str]) -> int:
    """Serves until a signal ends the server. Prints its address first, and aborted requests last.

    A token takes 0.05 s, or as many seconds as the last line of standard input says.

    Args:
        arguments: One argument, `shutdown_timeout_s` of the server.
    """
    config = ServerConfig(port=0, shutdown_timeout_s=float(arguments[0]))
    engine = FakeEngine(seconds_per_token=0.05)

    def read_pace() -> None:
        for line in sys.stdin:
            engine.seconds_per_token = float(line)

    threading.Thread(target=read_pace, daemon=True).start()
    bound = bind_socket(config)
    server = HttpServer(
        create_app(engine, config),
        engine,
        config,
        on_ready=lambda: print(socket_url(bound), flush=True),
    )
    asyncio.run(server.serve(sockets=[bound]))
    print("drained", sorted(engine.aborted), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(serve_forks(main))
