"""`python -m paxkv.serve`: builds an engine and serves it over HTTP."""

import argparse
import asyncio
import dataclasses
import logging
import socket
import sys
import types
import typing
from collections.abc import Sequence
from typing import TypeVar

import paxkv
from paxkv.client.async_client import AsyncEngineClient
from paxkv.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    RunnerConfig,
    SchedulerConfig,
    ServerConfig,
)
from paxkv.errors import ConfigError, EngineDeadError
from paxkv.package_origin import check_package_origin
from paxkv.server.app import create_app
from paxkv.server.http_server import HttpServer, bind_socket, socket_url

# Before the imports below: with a foreign `models` they would fail without saying why.
try:
    check_package_origin()
except ConfigError as error:
    raise SystemExit(f"paxkv: error: {error}") from None

from models.errors import ModelError
from paxkv.build import build_async_client

_ConfigT = TypeVar("_ConfigT")
_CONFIG_CLASSES = (ModelConfig, CacheConfig, SchedulerConfig, RunnerConfig, ServerConfig)
_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until a signal comes; returns the exit code of the process."""
    namespace = make_parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    # Our own few lines: how memory was planned, and where events go.
    logging.getLogger("paxkv").setLevel(logging.INFO)
    try:
        engine_config = EngineConfig(
            model=config_from_arguments(ModelConfig, namespace),
            cache=config_from_arguments(CacheConfig, namespace),
            scheduler=config_from_arguments(SchedulerConfig, namespace),
            runner=config_from_arguments(RunnerConfig, namespace),
        )
        server_config = config_from_arguments(ServerConfig, namespace)
        # Before the engine: a taken port is known at once, not after minutes of warm-up. The
        # port opens only when the engine is ready.
        with bind_socket(server_config) as bound:
            engine = build_async_client(engine_config, show_progress=True)
            asyncio.run(serve(engine, server_config, bound))
    except (ConfigError, ModelError, EngineDeadError) as error:
        print("paxkv: error:", *str(error).splitlines(), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0


async def serve(engine: AsyncEngineClient, config: ServerConfig, bound: socket.socket) -> None:
    """Starts the engine, serves it on a bound socket until a signal comes, and ends both."""
    try:
        await engine.start()
        server = HttpServer(
            create_app(engine, config),
            engine,
            config,
            on_ready=lambda: print(_banner(engine, socket_url(bound)), flush=True),
        )
        await server.serve(sockets=[bound])
    finally:
        await engine.close(drain_timeout_s=0.0)


def make_parser() -> argparse.ArgumentParser:
    """A command line with one flag per config field: `max_num_seqs` -> `--max-num-seqs`."""
    parser = argparse.ArgumentParser(
        prog="python -m paxkv.serve",
        description="Serves a language model over an OpenAI-compatible HTTP API.",
        allow_abbrev=False,
    )
    for config_class in _CONFIG_CLASSES:
        summary = (config_class.__doc__ or "").partition("\n")[0]
        group = parser.add_argument_group(config_class.__name__, summary)
        for field, field_type in _typed_fields(config_class):
            _add_flag(group, field, field_type)
    return parser


def config_from_arguments(config_class: type[_ConfigT], namespace: argparse.Namespace) -> _ConfigT:
    """The config that the flags describe.

    Raises:
        ConfigError: A value cannot work.
    """
    names = [field.name for field, _ in _typed_fields(config_class)]
    return config_class(**{name: getattr(namespace, name) for name in names})


def _add_flag(
    group: argparse._ArgumentGroup, field: dataclasses.Field[object], field_type: object
) -> None:
    flag = "--" + field.name.replace("_", "-")
    # In argparse's help texts a % begins a placeholder.
    help_text = str(field.metadata.get("help", "")).replace("%", "%%")
    if field.default is not None:
        help_text += " (default: %(default)s)"
    if field_type is bool:
        group.add_argument(
            flag, action=argparse.BooleanOptionalAction, default=field.default, help=help_text
        )
    elif typing.get_origin(field_type) is typing.Literal:
        choices = typing.get_args(field_type)
        group.add_argument(flag, choices=choices, default=field.default, help=help_text)
    else:
        assert isinstance(field_type, type)
        group.add_argument(
            flag,
            type=field_type,
            default=field.default,
            metavar=field_type.__name__.upper(),
            help=help_text,
        )


def _typed_fields(config_class: type) -> list[tuple[dataclasses.Field[object], object]]:
    """Fields with their types; `int | None` counts as `int`, because a flag left out is None."""
    types_by_name = typing.get_type_hints(config_class)
    return [
        (field, _without_none(types_by_name[field.name]))
        for field in dataclasses.fields(config_class)
    ]


def _without_none(field_type: object) -> object:
    if isinstance(field_type, types.UnionType):
        (field_type,) = (t for t in typing.get_args(field_type) if t is not types.NoneType)
    return field_type


def _banner(engine: AsyncEngineClient, url: str) -> str:
    info, stats = engine.model_info, engine.latest_stats
    return (
        f"paxkv {paxkv.__version__} is ready at {url}/v1\n"
        f"  model     {info.served_model_name} (max_model_len {info.max_model_len})\n"
        f"  KV cache  {stats.num_blocks} blocks, {info.max_fitting_tokens} tokens"
    )


if __name__ == "__main__":
    sys.exit(main())
