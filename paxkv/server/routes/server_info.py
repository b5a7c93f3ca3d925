"""GET /server_info, enabled by `--enable-admin`: the engine's settings, the machine's software."""

import asyncio
import dataclasses
import functools
import os
import platform

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import paxkv
from paxkv.config.engine_config import EngineConfig
from paxkv.config.environment_facts import PACKAGES, package_version, shown_variables
from paxkv.contracts.engine_start import ModelInfo
from paxkv.errors import InvalidRequestError
from paxkv.server.routes.json_response import json_response

SERVER_INFO_PATH = "/server_info"
_FORMATS = ("text", "json")
# Entries of an engine's `cache_settings` that are integers, written as texts.
_DECIDED_COUNTS = ("block_size", "num_gpu_blocks")


class ServerInfoRoutes:
    """The route of the settings, which have vLLM's names.

    Args:
        engine_config: None if unknown.
    """

    def __init__(self, model_info: ModelInfo, engine_config: EngineConfig | None) -> None:
        self._settings = engine_settings(model_info, engine_config)

    def routes(self) -> list[Route]:
        return [Route(SERVER_INFO_PATH, self.server_info)]

    async def server_info(self, request: Request) -> Response:
        """Shows settings as a text, or with `?config_format=json` as an object."""
        config_format = request.query_params.get("config_format", "text")
        if config_format not in _FORMATS:
            raise InvalidRequestError(
                f"config_format must be text or json, got {config_format!r}.",
                param="config_format",
            )
        info = {
            "vllm_config": self._settings if config_format == "json" else _as_text(self._settings),
            # Meant for vLLM's environment variables; paxkv reads only the API key among them.
            "vllm_env": {},
            "system_env": await asyncio.to_thread(_system_env),
        }
        return json_response(info)


def engine_settings(
    model_info: ModelInfo, engine_config: EngineConfig | None
) -> dict[str, dict[str, object]]:
    """Settings in groups with vLLM's names, including values that the engine chose at its start.

    Secrets are left out. So are all settings of the server, because they contain its API keys.
    """
    sections: dict[str, dict[str, object]] = {"model_config": {}, "cache_config": {}}
    if engine_config is not None:
        for field in dataclasses.fields(engine_config):
            sections[f"{field.name}_config"] = _shown_fields(getattr(engine_config, field.name))
    sections["model_config"] |= {
        "model": model_info.model,
        "served_model_name": list(model_info.model_names),
        "max_model_len": model_info.max_model_len,
        "vocab_size": model_info.vocab_size,
    }
    counts = model_info.cache_settings
    sections["cache_config"] |= {
        name: int(counts[name]) for name in _DECIDED_COUNTS if name in counts
    }
    return sections


def _shown_fields(section: object) -> dict[str, object]:
    values = dataclasses.asdict(section)
    return {field.name: values[field.name] for field in dataclasses.fields(section) if field.repr}


def _as_text(settings: dict[str, dict[str, object]]) -> str:
    return ", ".join(
        f"{section}.{name}={value!r}"
        for section, fields in settings.items()
        for name, value in fields.items()
    )


@functools.cache
def _system_env() -> dict[str, str]:
    """The machine and its software, under vLLM's names; only the engine process knows devices."""
    versions = {package: package_version(package) for package in PACKAGES}
    return {
        "paxkv_version": paxkv.__version__,
        "os": f"{platform.system()} {platform.release()}",
        "libc_version": "-".join(platform.libc_ver()),
        "python_version": f"{platform.python_version()} ({platform.python_implementation()})",
        "python_platform": platform.platform(),
        "cpu_info": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "pip_packages": "\n".join(f"{name}=={v}" for name, v in versions.items() if v is not None),
        "env_vars": "\n".join(f"{name}={value}" for name, value in shown_variables().items()),
    }
