"""`python -m paxkv.entrypoints.engine_process`: the engine process, which a server starts."""

import gc

# Imports make a million objects and almost no garbage, and collection takes a fifth of their time.
# `build` enables the collector.
if __name__ == "__main__":
    gc.disable()

import sys
from collections.abc import Callable
from pathlib import Path

from models.errors import ModelError
from paxkv.config.engine_config import EngineConfig
from paxkv.contracts.engine_start import EngineReady
from paxkv.engine.core_process import leave_signals_to_parent, run_engine_process
from paxkv.engine.engine_core import EngineCore
from paxkv.entrypoints.build import build_core
from paxkv.entrypoints.process_logging import set_up_logging
from paxkv.errors import ConfigError


def build(
    config: EngineConfig, *, show_progress: bool, on_model_found: Callable[[Path], None]
) -> tuple[EngineCore, EngineReady]:
    """Builds the core that the process runs. Raises the same errors as `BuildCore`."""
    # Tracing makes millions of objects and almost no garbage, and collection takes a fifth of its
    # time. Objects of the start live as long as the process, so later collections skip them.
    gc.disable()
    try:
        built = build_core(config, show_progress=show_progress, on_model_found=on_model_found)
    except ModelError as error:
        # The parent process has no JAX, so it cannot import `ModelError` from `models`.
        raise ConfigError(str(error)) from error
    finally:
        gc.freeze()
        gc.enable()
    return built.core, built.ready


def main() -> int:
    """Runs the engine that standard input describes; returns the exit code of the process."""
    leave_signals_to_parent()
    set_up_logging()
    return run_engine_process(build)


if __name__ == "__main__":
    sys.exit(main())
