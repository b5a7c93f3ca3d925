"""Settings of the Ray application, read from the arguments of `serve run`."""

import argparse
import dataclasses
import json
import math
from collections.abc import Mapping
from typing import NoReturn

from paxkv.config.command_line import add_config_flags, config_from_arguments
from paxkv.config.engine_config import EngineConfig
from paxkv.config.server_config import ServerConfig
from paxkv.config.setting import at_least, is_number, setting
from paxkv.entrypoints.cli.arguments import add_serve_arguments, parse_arguments
from paxkv.entrypoints.engine_flags import ENGINE_CONFIG_CLASSES, engine_config_from_arguments
from paxkv.errors import ConfigError

# The flags of `paxkv serve` that do not exist here. Ray Serve's proxy has the port and its
# settings. Some routes are useful only with one engine. A replica runs on one host. No response is
# stored, because it would be in the memory of one replica only.
_WITHOUT = (
    *("host", "port", "root_path", "max_connections", "request_timeout_s"),
    *("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs"),
    *("enable_admin", "profile_dir", "response_store_bytes"),
    *("enable_inspector", "inspector_show_text", "inspector_max_trace_bytes"),
    *("nnodes", "node_rank", "master_addr", "master_port", "distributed_timeout_seconds"),
)
_TRUTHS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    """Settings of the replicas."""

    num_replicas: int = setting("number of engines, unless max_replicas is set", 1)
    min_replicas: int = setting("smallest number of engines with max_replicas", 1)
    max_replicas: int | None = setting(
        "largest number of engines. If set, engines start while requests wait, and end while fewer "
        "suffice",
        None,
    )
    num_ingresses: int = setting("number of processes that choose engines and relay answers", 1)
    num_cpus: int = setting("processor cores of each engine", 1)
    num_gpus: int | None = setting(
        "GPUs of each engine; tensor_parallel_size must not be larger. 0 if left out", None
    )
    max_ongoing_requests: int = setting(
        "largest number of requests that run or wait in one engine. Further requests wait for an "
        "engine with room",
        1000,
    )
    accept_timeout_s: float = setting(
        "seconds in which an engine must accept a request; otherwise the client gets status 503",
        60.0,
    )
    request_router: str = setting(
        "class that chooses the engine of a request: paxkv's, or another of Ray Serve, such as "
        "ray.serve.experimental.round_robin_router.RoundRobinRouter",
        "paxkv.ray.request_router.PrefixRequestRouter",
    )

    def __post_init__(self) -> None:
        for name in ("num_replicas", "num_ingresses", "num_cpus", "max_ongoing_requests"):
            at_least(name, getattr(self, name), 1)
        # Without any engine, no engine reports requests, so the first would never start.
        at_least("min_replicas", self.min_replicas, 1)
        if self.max_replicas is not None:
            at_least("max_replicas", self.max_replicas, self.min_replicas)
        if self.num_gpus is not None:
            at_least("num_gpus", self.num_gpus, 0)
        if not (is_number(self.accept_timeout_s) and 0 < self.accept_timeout_s < math.inf):
            raise ConfigError(
                f"accept_timeout_s must be a number above 0, got {self.accept_timeout_s!r}."
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    """All settings of the application."""

    ray: RayConfig
    engine: EngineConfig
    server: ServerConfig


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def read_settings(arguments: Mapping[str, object]) -> RaySettings:
    """Reads the settings from arguments such as `{"model": "org/name", "max_num_seqs": "32"}`.

    The names are the flags of `paxkv serve`, with underscores or hyphens, and the fields of
    `RayConfig`. Values may be text or values of a YAML file.

    Raises:
        ConfigError: An argument is unknown or its value is invalid.
    """
    parser = _Parser(prog="paxkv.ray", allow_abbrev=False)
    add_config_flags(parser, RayConfig)
    for config_class in ENGINE_CONFIG_CLASSES:
        add_config_flags(parser, config_class, without=_WITHOUT)
    add_config_flags(parser, ServerConfig, without=_WITHOUT)
    add_serve_arguments(parser)
    switches = {
        flag
        for flag, action in parser._option_string_actions.items()
        if isinstance(action, argparse.BooleanOptionalAction)
    }
    words = [word for item in arguments.items() for word in _words(*item, switches)]
    namespace = parse_arguments(parser, words)
    server = config_from_arguments(ServerConfig, namespace)
    settings = RaySettings(
        ray=config_from_arguments(RayConfig, namespace),
        engine=engine_config_from_arguments(namespace),
        server=dataclasses.replace(server, response_store_bytes=0, enable_inspector=False),
    )
    num_gpus, num_devices = settings.ray.num_gpus, settings.engine.parallel.tensor_parallel_size
    if num_gpus and num_devices > num_gpus:
        raise ConfigError(
            f"tensor_parallel_size={num_devices} is more than num_gpus={num_gpus}. Set num_gpus to "
            "the GPUs that each engine needs."
        )
    return settings


def _words(name: str, value: object, switches: set[str]) -> list[str]:
    """The words of a command line for one argument."""
    flag = f"--{name.replace('_', '-')}"
    if value is None:
        return []
    if flag in switches:
        truth = value if isinstance(value, bool) else _TRUTHS.get(str(value).lower())
        if truth is None:
            raise ConfigError(f"{name} must be true or false, got {value!r}.")
        return [flag if truth else f"--no-{flag[2:]}"]
    if isinstance(value, dict):
        return [f"{flag}={json.dumps(value)}"]
    if isinstance(value, list):
        return [flag, *map(str, value)]
    return [f"{flag}={value}"]
