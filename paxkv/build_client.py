"""The half of a server that needs no JAX: text, checks and the client, before an engine process."""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

from paxkv.client.async_client import AsyncEngineClient
from paxkv.client.engine_supervisor import EngineSupervisor, RestartPolicy
from paxkv.client.input_processor import InputProcessor, all_eos_token_ids
from paxkv.client.output_processor import OutputProcessor
from paxkv.config import EngineConfig, ModelConfig, ServerConfig
from paxkv.contracts.engine_start import EngineReady
from paxkv.structured_output.checker_process import CheckerProcess
from paxkv.text.chat_template import ChatTemplate
from paxkv.text.reasoning_parser import thought_token_ids
from paxkv.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextParts:
    """What turns text into tokens and back; None where the model came without."""

    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None


def load_text_parts(config: ModelConfig, folder: Path) -> TextParts:
    """Those of a model's folder, or of the settings that stand in for them."""
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        logger.warning(
            "%s has no tokenizer.json: prompts must be token ids, and no text is made.", folder
        )
    options = {
        "special_tokens": tokenizer.special_tokens if tokenizer is not None else {},
        "content_format": config.chat_template_content_format,
    }
    if config.chat_template is not None:
        chat_template = ChatTemplate.from_setting(config.chat_template, **options)
    else:
        chat_template = ChatTemplate.from_folder(folder, **options)
    return TextParts(tokenizer=tokenizer, chat_template=chat_template)


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The one of a model's folder, if it has any."""
    has_file = (folder / "tokenizer.json").is_file()
    return Tokenizer.from_folder(folder) if has_file else None


def find_grammar_setup(
    tokenizer: Tokenizer | None, model_eos_token_ids: Sequence[int], vocab_size: int
) -> dict[str, object] | None:
    """Arguments of those who compile grammars; None where that cannot be."""
    eos_token_ids = all_eos_token_ids(tokenizer, model_eos_token_ids, vocab_size)
    # Nothing but an EOS token says that a grammar is complete.
    if tokenizer is None or not eos_token_ids:
        return None
    return {
        "tokenizer_json": tokenizer.json,
        "vocab_size": vocab_size,
        "eos_token_ids": eos_token_ids,
        "thought_token_ids": thought_token_ids(tokenizer, vocab_size),
    }


def make_input_processor(ready: EngineReady, tokenizer: Tokenizer | None) -> InputProcessor:
    """Checks what an engine can take."""
    grammar_setup = find_grammar_setup(tokenizer, ready.eos_token_ids, ready.model_info.vocab_size)
    return InputProcessor(
        tokenizer=tokenizer,
        vocab_size=ready.model_info.vocab_size,
        max_model_len=ready.model_info.max_model_len,
        max_fitting_tokens=ready.model_info.max_fitting_tokens,
        max_prompt_tokens=ready.max_prompt_tokens,
        eos_token_ids=ready.eos_token_ids,
        grammar_checker=CheckerProcess(**grammar_setup) if grammar_setup else None,
        max_logprobs=ready.model_info.max_logprobs,
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
    engine = EngineSupervisor(
        config,
        policy,
        max_step_s=server_config.execute_model_timeout_s,
        max_idle_start_s=server_config.engine_ready_timeout_s,
        show_progress=show_progress,
    )
    found: list[TextParts] = []
    try:
        # While the engine loads its weights.
        ready = engine.wait_until_ready(
            lambda folder: found.append(load_text_parts(config.model, folder))
        )
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
