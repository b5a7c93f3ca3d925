"""Replicas on Ray Serve: `serve run paxkv.ray:app`. Needs the extra `ray`."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paxkv.ray.application import app

__all__ = ["app"]


# Imported on first use, so that the modules that do not need Ray work without it.
def __getattr__(name: str) -> object:
    if name == "app":
        return importlib.import_module("paxkv.ray.application").app
    raise AttributeError(f"module 'paxkv.ray' has no attribute {name!r}")
