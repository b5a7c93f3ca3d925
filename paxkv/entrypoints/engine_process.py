"""`python -m paxkv.entrypoints.engine_process`: the engine process, which a server starts."""

import gc

# Imports make a million objects and almost no garbage, and collection takes a fifth of their time.
# `build` enables the collector.
if __name__ == "__main__":
    gc.disable()

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from models.errors import ModelError
from paxkv.config.engine_config import EngineConfig
from paxkv.contracts.engine_start import EngineReady
from paxkv.contracts.rank_place import RankPlace
from paxkv.engine.core_process import leave_signals_to_parent, run_engine_process
from paxkv.engine.engine_core import EngineCore
from paxkv.entrypoints.build import build_core, build_follower_runner
from paxkv.entrypoints.process_logging import set_up_logging
from paxkv.errors import ConfigError
from paxkv.runner.ranks.join_group import is_in_group


def build(
    config: EngineConfig,
    *,
    show_progress: bool,
    on_model_found: Callable[[Path], None],
    place: RankPlace | None = None,
) -> tuple[EngineCore, EngineReady]:
    """Builds the core that the process runs. Raises the same errors as `BuildCore`."""
    with _building():
        built = build_core(
            config, show_progress=show_progress, on_model_found=on_model_found, place=place
        )
    return built.core, built.ready


def build_follower(config: EngineConfig, *, place: RankPlace) -> Callable[[], None]:
    """Builds a follower. See `BuildFollower`."""
    with _building():
        return build_follower_runner(config, place).follow


@contextlib.contextmanager
def _building() -> Iterator[None]:
    # Tracing makes millions of objects and almost no garbage, and collection takes a fifth of its
    # time. Objects of the start live as long as the process, so later collections skip them.
    gc.disable()
    try:
        yield
    except ModelError as error:
        # The parent process has no JAX, so it cannot import `ModelError` from `models`.
        raise ConfigError(str(error)) from error
    finally:
        gc.freeze()
        gc.enable()


def main() -> int:
    """Runs the engine that standard input describes; returns the exit code of the process."""
    leave_signals_to_parent()
    set_up_logging()
    code = run_engine_process(build, build_follower)
    if is_in_group():
        # JAX would wait for the other processes of the group, which may have been killed.
        sys.stderr.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
