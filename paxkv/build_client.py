"""The half of a server that needs no JAX: text, checks and the client, before an engine process."""

import dataclasses
import logging
from pathlib import Path

from paxkv.client.async_client import AsyncEngineClient
from paxkv.client.engine_supervisor import EngineSupervisor, RestartPolicy
from paxkv.client.input_processor import InputProcessor
from paxkv.client.output_processor import OutputProcessor
from paxkv.config import EngineConfig, ServerConfig
from paxkv.contracts.engine_start import EngineReady
from paxkv.text.chat_template import ChatTemplate
from paxkv.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextParts:
    """What turns text into tokens and back; None where the model came without."""

    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None


def load_text_parts(folder: Path) -> TextParts:
    """Those of a model's folder."""
    tokenizer = None
    if (folder / "tokenizer.json").is_file():
        tokenizer = Tokenizer.from_folder(folder)
    else:
        logger.warning(
            "%s has no tokenizer.json: prompts must be token ids, and no text is made.", folder
        )
    special_tokens = tokenizer.special_tokens if tokenizer is not None else {}
    return TextParts(
        tokenizer=tokenizer,
        chat_template=ChatTemplate.from_folder(folder, special_tokens=special_tokens),
    )


def make_input_processor(ready: EngineReady, tokenizer: Tokenizer | None) -> InputProcessor:
    """Checks what an engine can take."""
    return InputProcessor(
        tokenizer=tokenizer,
        vocab_size=ready.model_info.vocab_size,
        max_model_len=ready.model_info.max_model_len,
        max_fitting_tokens=ready.model_info.max_fitting_tokens,
        max_prompt_tokens=ready.max_prompt_tokens,
        eos_token_ids=ready.eos_token_ids,
    )


def build_async_client(
    config: EngineConfig, server_config: ServerConfig, *, show_progress: bool = False
) -> AsyncEngineClient:
    """Starts an engine process and makes its asyncio client; `start` the client on its loop.

    Args:
        show_progress: The engine draws a bar on stderr while its steps compile.

    Raises:
        ConfigError: The settings do not fit the model or the device, or the model cannot be loaded.
        EngineDeadError: The engine ended before it was ready.
    """
    policy = RestartPolicy(
        max_restarts=server_config.max_engine_restarts,
        window_s=server_config.engine_restart_window_s,
    )
    engine = EngineSupervisor(config, policy, show_progress=show_progress)
    found: list[TextParts] = []
    try:
        # While the engine loads its weights.
        ready = engine.wait_until_ready(lambda folder: found.append(load_text_parts(folder)))
        (text,) = found
        return AsyncEngineClient(
            engine,
            make_input_processor(ready, text.tokenizer),
            OutputProcessor(text.tokenizer),
            ready.model_info,
            tokenizer=text.tokenizer,
            chat_template=text.chat_template,
        )
    except BaseException:
        engine.close()
        raise
