"""The one place where an engine's objects are constructed and wired."""

import dataclasses
import importlib.resources
import logging
import os
import time
from pathlib import Path

from paxkv.client.async_client import AsyncEngineClient
from paxkv.client.inproc_client import InprocClient
from paxkv.client.input_processor import InputProcessor
from paxkv.client.output_processor import OutputProcessor
from paxkv.config import EngineConfig
from paxkv.contracts.engine_client import EngineTransport
from paxkv.contracts.model_info import ModelInfo
from paxkv.engine.core_thread import CoreThread
from paxkv.engine.engine_core import EngineCore
from paxkv.errors import ConfigError
from paxkv.package_origin import check_package_origin
from paxkv.scheduler.scheduler import Scheduler
from paxkv.text.chat_template import ChatTemplate
from paxkv.text.tokenizer import Tokenizer

# Before the imports below: with a foreign `models` they would fail without saying why.
check_package_origin()

from models import ModelConfig, load_model  # noqa: E402
from models.loading.source import resolve_model_folder  # noqa: E402
from paxkv.runner.memory_plan import GPU_SHARE_VARIABLE  # noqa: E402
from paxkv.runner.model_runner import ModelRunner  # noqa: E402

logger = logging.getLogger(__name__)

DEMO_MODEL_NAME = "paxkv-demo"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BuiltEngine:
    """A running engine and what a client of it needs."""

    transport: EngineTransport
    input_processor: InputProcessor
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    model_info: ModelInfo


def build_engine(config: EngineConfig, *, show_progress: bool = False) -> BuiltEngine:
    """Loads the model, compiles every step, and starts the engine's thread.

    Args:
        show_progress: Draws a bar on stderr while steps compile.

    Raises:
        ConfigError: The settings do not fit the model or the device.
        ModelError: The model cannot be loaded.
    """
    # Read by JAX when it first touches a GPU, and the only way to tell it how much memory to take.
    os.environ.setdefault(GPU_SHARE_VARIABLE, f"{config.cache.gpu_memory_utilization:g}")
    folder = _model_folder(config)
    tokenizer = _load_tokenizer(folder)
    special_tokens = tokenizer.special_tokens if tokenizer is not None else {}
    chat_template = ChatTemplate.from_folder(folder, special_tokens=special_tokens)
    model = load_model(
        folder,
        dtype=config.model.dtype,
        load_format=config.model.load_format,
        seed=config.model.seed,
    )
    max_model_len = _max_model_len(config, model.config)
    runner = ModelRunner(
        model,
        cache_config=config.cache,
        scheduler_config=config.scheduler,
        max_model_len=max_model_len,
        seed=config.model.seed,
        show_progress=show_progress,
    )
    logger.info("%s", runner.memory_plan.report())
    runner.warm_up()
    scheduler = Scheduler(
        scheduler_config=config.scheduler,
        cache_config=config.cache,
        kv_cache_config=runner.kv_cache_config,
        max_model_len=max_model_len,
    )
    input_processor = InputProcessor(
        tokenizer=tokenizer,
        vocab_size=model.config.vocab_size,
        max_model_len=max_model_len,
        max_fitting_tokens=scheduler.limits.max_tokens_that_fit,
        max_prompt_tokens=scheduler.limits.max_prompt_tokens,
        # Those of config.json and generation_config.json.
        eos_token_ids=model.config.eos_token_ids,
    )
    return BuiltEngine(
        transport=CoreThread(EngineCore(scheduler, runner)),
        input_processor=input_processor,
        tokenizer=tokenizer,
        chat_template=chat_template,
        model_info=ModelInfo(
            served_model_name=_served_model_name(config),
            model=config.model.model or DEMO_MODEL_NAME,
            max_model_len=max_model_len,
            vocab_size=model.config.vocab_size,
            max_fitting_tokens=scheduler.limits.max_tokens_that_fit,
            created=int(time.time()),
        ),
    )


def build_llm_client(engine: BuiltEngine) -> InprocClient:
    """The synchronous client of a built engine."""
    return InprocClient(engine.transport, OutputProcessor(engine.tokenizer))


def build_async_client(config: EngineConfig, *, show_progress: bool = False) -> AsyncEngineClient:
    """Builds an engine and its asyncio client; `start` the client on its loop."""
    engine = build_engine(config, show_progress=show_progress)
    return AsyncEngineClient(
        engine.transport,
        engine.input_processor,
        OutputProcessor(engine.tokenizer),
        engine.model_info,
        tokenizer=engine.tokenizer,
        chat_template=engine.chat_template,
    )


def _model_folder(config: EngineConfig) -> Path:
    if config.model.model is None:
        return Path(str(importlib.resources.files("models.demo") / "checkpoint"))
    with_weights = config.model.load_format != "dummy"
    return resolve_model_folder(config.model.model, with_weights=with_weights)


def _served_model_name(config: EngineConfig) -> str:
    return config.model.served_model_name or config.model.model or DEMO_MODEL_NAME


def _load_tokenizer(folder: Path) -> Tokenizer | None:
    if (folder / "tokenizer.json").is_file():
        return Tokenizer.from_folder(folder)
    logger.warning(
        "%s has no tokenizer.json: prompts must be token ids, and no text is made.", folder
    )
    return None


def _max_model_len(config: EngineConfig, model_config: ModelConfig) -> int:
    asked, limit = config.model.max_model_len, model_config.max_scaled_positions
    if asked is not None and asked > limit:
        raise ConfigError(
            f"max_model_len={asked} is more than the {limit} positions that the model has. "
            f"Set at most {limit}, or leave it out."
        )
    return model_config.max_position_embeddings if asked is None else asked
