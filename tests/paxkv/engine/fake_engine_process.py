"""An engine process with a fake executor: `python -m tests.paxkv.engine.fake_engine_process`."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from paxkv.config.engine_config import EngineConfig
from paxkv.config.model_config import ModelConfig
from paxkv.contracts.engine_start import EngineReady, ModelInfo
from paxkv.contracts.rank_place import RankPlace
from paxkv.engine.core_process import leave_signals_to_parent, run_engine_process
from paxkv.engine.engine_core import EngineCore
from paxkv.errors import ConfigError
from tests.paxkv.engine.fake_engine import make_engine_core

COMMAND = (sys.executable, "-P", "-m", "tests.paxkv.engine.fake_engine_process")
VOCAB_SIZE = 300


def fake_config(**settings: object) -> EngineConfig:
    """A config of the fake; `settings` are those of `make_engine_core`, and:

    Args:
        start_s: How long the start takes, waiting; `work_s`: and then computing for a tenth of the
            time, ten times as much as counts as work.
        mistake: The start is refused with this message.
        bug: The start fails with this message.
        exit_code: The process exits while it starts; below 0 it kills itself with that signal.
        healthy_file: Only if this file does not exist yet: it is made, and the start succeeds.
            Later ones fail.
        follower_mistake: A follower refuses to start with this message.
        follower_error: A follower starts, and then raises an error with this message.
    """
    return EngineConfig(model=ModelConfig(model=json.dumps(settings)))


def build_follower(config: EngineConfig, *, place: RankPlace) -> Callable[[], None]:
    settings = json.loads(config.model.model)
    if "follower_mistake" in settings:
        raise ConfigError(settings["follower_mistake"])

    def follow() -> None:
        if "follower_error" in settings:
            raise RuntimeError(settings["follower_error"])
        threading.Event().wait()

    return follow


def _compute(seconds: float) -> None:
    end_s = time.process_time() + seconds
    while time.process_time() < end_s:
        pass


def build(
    config: EngineConfig,
    *,
    show_progress: bool,
    on_model_found: Callable[[Path], None],
    place: RankPlace | None = None,
) -> tuple[EngineCore, EngineReady]:
    settings = json.loads(config.model.model)
    for name in ("follower_mistake", "follower_error"):
        settings.pop(name, None)
    time.sleep(settings.pop("start_s", 0))
    end_s = time.monotonic() + settings.pop("work_s", 0)
    while time.monotonic() < end_s:
        _compute(0.01)
        time.sleep(0.09)
    order_file = settings.pop("order_file", None)
    if order_file is not None:
        with open(order_file, "a") as file:
            print(config.cache.num_gpu_blocks_override, config.model.max_model_len, file=file)
    if "mistake" in settings:
        raise ConfigError(settings["mistake"])
    if "bug" in settings:
        raise RuntimeError(settings["bug"])
    exit_code = settings.pop("exit_code", None)
    if exit_code is not None:
        if exit_code < 0:
            os.kill(os.getpid(), -exit_code)
        os._exit(exit_code)
    healthy_file = settings.pop("healthy_file", None)
    if healthy_file is not None:
        if os.path.exists(healthy_file):
            raise ConfigError("the second start fails")
        Path(healthy_file).touch()
    on_model_found(Path("/models/fake"))
    core = make_engine_core(**settings)
    ready = EngineReady(
        model_info=ModelInfo(
            served_model_name="fake",
            model="fake",
            max_model_len=settings.get("max_model_len", 256),
            vocab_size=VOCAB_SIZE,
            max_fitting_tokens=(settings.get("num_blocks", 65) - 1) * 8,
            created=0,
            max_num_seqs=settings.get("max_num_seqs", 8),
            cache_settings={"block_size": "8"},
        ),
        eos_token_ids=(0,),
        max_prompt_tokens=None,
        stats=msgspec.structs.replace(core.make_stats(), num_padded_tokens=0),
    )
    return core, ready


if __name__ == "__main__":
    leave_signals_to_parent()
    sys.exit(run_engine_process(build, build_follower))
