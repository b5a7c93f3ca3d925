"""`python -m paxkv.serve`: starts an engine process and serves it over HTTP."""

from paxkv.entrypoints.command_end import (
    INTERRUPTED,
    TERMINATED,
    Terminated,
    end_by_signals,
    ended_by_sigterm,
    run_command,
)

# Before the imports below, which take their time.
if __name__ == "__main__":
    end_by_signals()

import argparse
import asyncio
import signal
import socket
import sys
from collections.abc import Sequence

import paxkv
from paxkv.asgi import EngineApp
from paxkv.client.async_client import AsyncEngineClient
from paxkv.config.command_line import add_config_flags, config_from_arguments
from paxkv.config.engine_config import EngineConfig
from paxkv.config.server_config import ServerConfig
from paxkv.entrypoints.build_client import build_async_client
from paxkv.entrypoints.cli.arguments import add_serve_arguments, parse_arguments
from paxkv.entrypoints.cli.command_parser import CommandParser
from paxkv.entrypoints.engine_flags import ENGINE_CONFIG_CLASSES, engine_config_from_arguments
from paxkv.entrypoints.process_logging import set_up_logging
from paxkv.errors import ConfigError, EngineDeadError
from paxkv.fleet.follower_host import FollowerHost
from paxkv.package_origin import check_package_origin
from paxkv.server.http_server import HttpServer, bind_socket, socket_url


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until a signal comes; returns the exit code of the process."""
    namespace = parse_arguments(make_parser(), arguments)
    set_up_logging()
    try:
        # The engine process would fail without saying why.
        check_package_origin()
        engine_config = engine_config_from_arguments(namespace)
        server_config = config_from_arguments(ServerConfig, namespace)
        if engine_config.parallel.node_rank > 0:
            with ended_by_sigterm():
                idle_s = server_config.engine_ready_timeout_s
                FollowerHost(engine_config, max_idle_start_s=idle_s).run()
            return 0
        # Before the engine: a taken port is known at once, not after minutes of warm-up. The
        # port opens only when the engine is ready.
        with bind_socket(server_config) as bound:
            with ended_by_sigterm():
                engine = build_async_client(engine_config, server_config, show_progress=True)
            asyncio.run(serve(engine, server_config, bound, engine_config))
    except (ConfigError, EngineDeadError) as error:
        print("paxkv: error:", *str(error).splitlines(), file=sys.stderr)
        return 1
    except Terminated:
        # The process must end by the signal, so that its sender sees that it worked.
        signal.raise_signal(signal.SIGTERM)
        return TERMINATED
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


async def serve(
    engine: AsyncEngineClient,
    config: ServerConfig,
    bound: socket.socket,
    engine_config: EngineConfig | None = None,
) -> None:
    """Starts the engine, serves it on a bound socket until a signal comes, and ends both.

    Args:
        engine_config: As `create_app` has it.

    Raises:
        EngineDeadError: The engine has ended, and none takes its place.
    """
    served = await EngineApp.start_built(engine, config, engine_config)
    watcher: asyncio.Task[None] | None = None
    try:
        server = HttpServer(
            served.app,
            engine,
            config,
            on_ready=lambda: print(
                _banner(engine, socket_url(bound, is_tls=config.is_tls)), flush=True
            ),
        )
        watcher = asyncio.create_task(_end_with_engine(engine, server))
        await server.serve(sockets=[bound])
        if watcher.done():
            watcher.result()
    finally:
        if watcher is not None:
            watcher.cancel()
        await served.close()


async def _end_with_engine(engine: AsyncEngineClient, server: HttpServer) -> None:
    reason = await engine.wait_until_ended()
    # Not when the server is what ended it.
    if not server.should_exit:
        server.should_exit = True
        raise EngineDeadError(f"the engine has ended: {reason}")


def make_parser() -> argparse.ArgumentParser:
    """A command line with one flag per config field: `max_num_seqs` -> `--max-num-seqs`."""
    parser = CommandParser(
        prog="paxkv serve",
        description="Serves a language model over an OpenAI-compatible HTTP API.",
        allow_abbrev=False,
    )
    for config_class in (*ENGINE_CONFIG_CLASSES, ServerConfig):
        add_config_flags(parser, config_class)
    add_serve_arguments(parser)
    return parser


def _banner(engine: AsyncEngineClient, url: str) -> str:
    info, stats = engine.model_info, engine.latest_stats
    return (
        f"paxkv {paxkv.__version__} is ready at {url}/v1\n"
        f"  model     {info.served_model_name} (max_model_len {info.max_model_len})\n"
        f"  KV cache  {stats.num_blocks} blocks, {info.max_fitting_tokens} tokens"
    )


if __name__ == "__main__":
    sys.exit(run_command(main))
