"""Builds the parts of a server that need no JAX: text, checks and the client of the engines."""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

from paxkv.client.async_client import AsyncEngineClient
from paxkv.client.input_processor import InputProcessor, all_eos_token_ids
from paxkv.client.output_processor import OutputProcessor
from paxkv.config.engine_config import EngineConfig
from paxkv.config.model_config import ModelConfig
from paxkv.config.server_config import ServerConfig
from paxkv.contracts.engine_start import EngineReady, ModelInfo
from paxkv.contracts.wire import LoopTransport
from paxkv.errors import ConfigError
from paxkv.fleet.data_parallel import DataParallelTransport
from paxkv.fleet.engine_supervisor import EngineSupervisor, RestartPolicy
from paxkv.fleet.follower_hosts import FollowerHosts
from paxkv.fleet.replica_places import (
    replica_config,
    replica_environments,
    replicas_share_memory,
    same_sized_config,
)
from paxkv.structured_output.checker_process import CheckerProcess
from paxkv.text.chat_template import ChatTemplate
from paxkv.text.reasoning_parser import thought_token_ids
from paxkv.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextParts:
    """The tokenizer and the chat template; None if the model has none."""

    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None


def load_text_parts(config: ModelConfig, folder: Path) -> TextParts:
    """Loads the text parts from a model's folder, or the chat template from its setting."""
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        logger.warning(
            "%s has no tokenizer.json: prompts must be token ids, and answers have no text. "
            "--tokenizer names a folder or hub repository that has one.",
            folder,
        )
    options = {
        "special_tokens": tokenizer.special_tokens if tokenizer is not None else {},
        "content_format": config.chat_template_content_format,
    }
    if config.chat_template is not None:
        chat_template = ChatTemplate.from_setting(config.chat_template, **options)
    else:
        chat_template = ChatTemplate.from_folder(folder, **options)
        for problem in chat_template.find_errors() if chat_template is not None else ():
            logger.warning("%s: %s", folder, problem)
    return TextParts(tokenizer=tokenizer, chat_template=chat_template)


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a model's folder; None if there is none."""
    has_file = (folder / "tokenizer.json").is_file()
    return Tokenizer.from_folder(folder) if has_file else None


def find_grammar_setup(
    tokenizer: Tokenizer | None, model_eos_token_ids: Sequence[int], vocab_size: int
) -> dict[str, object] | None:
    """Arguments for grammar compilers and checkers; None if grammars are not possible."""
    eos_token_ids = all_eos_token_ids(tokenizer, model_eos_token_ids, vocab_size)
    # Only an EOS token can show that a grammar is complete.
    if tokenizer is None or not eos_token_ids:
        return None
    return {
        "tokenizer_json": tokenizer.json,
        "vocab_size": vocab_size,
        "eos_token_ids": eos_token_ids,
        "thought_token_ids": thought_token_ids(tokenizer, vocab_size),
    }


def log_sampling_defaults(model_info: ModelInfo) -> None:
    """Logs the sampling defaults that change answers, and how to disable them."""
    changes = model_info.sampling_defaults.generation_config.changes
    if changes:
        logger.info(
            "the defaults of requests are %s, from the model's generation_config.json or the "
            "flags. To ignore the file, start with --generation-config vllm.",
            ", ".join(f"{name}={value}" for name, value in changes.items()),
        )


def log_feature_uses(model_info: ModelInfo) -> None:
    """Logs the features that are not used with this model, with the reasons."""
    for feature in model_info.feature_uses:
        if not feature.is_used:
            logger.info("feature %s is not used: %s", feature.name, feature.detail)


def make_input_processor(
    ready: EngineReady, tokenizer: Tokenizer | None, *, default_max_tokens: int | None = None
) -> InputProcessor:
    """Builds the input processor for an engine.

    Args:
        default_max_tokens: As in `InputProcessor`.
    """
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
        default_max_tokens=default_max_tokens,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StartedEngines:
    """Engine processes behind one transport, and the data that their client needs."""

    transport: LoopTransport
    ready: EngineReady
    text: TextParts


def start_engines(
    config: EngineConfig,
    policy: RestartPolicy,
    *,
    max_step_s: float = 0.0,
    max_idle_start_s: float = 0.0,
    stall_s: float = 0.0,
    show_progress: bool = False,
) -> StartedEngines:
    """Starts `ParallelConfig.data_parallel_size` engine processes and waits until all are ready.

    Args:
        max_step_s: This and the following arguments are described in `EngineSupervisor`.

    Raises:
        ConfigError: The settings do not fit the model or the machine, or the model cannot be
            loaded.
        EngineDeadError: An engine ended before it was ready.
    """
    # These checks are first, because they fail immediately.
    if config.parallel.node_rank > 0:
        raise ConfigError(
            f"node_rank is {config.parallel.node_rank}, but only host 0 has a client. Run `paxkv "
            "serve` with the same settings on the other hosts."
        )
    sizes = config.parallel.data_parallel_size, config.parallel.tensor_parallel_size
    environments = replica_environments(*sizes)
    configs = [replica_config(config, idx) for idx in range(len(environments))]
    hosts = FollowerHosts(config) if config.parallel.nnodes > 1 else None
    engines: list[EngineSupervisor] = []

    def start(idx: int) -> EngineSupervisor:
        engine = EngineSupervisor(
            configs[idx],
            policy,
            max_step_s=max_step_s,
            max_idle_start_s=max_idle_start_s,
            stall_s=stall_s,
            show_progress=show_progress and idx == 0,
            environment=environments[idx],
            hosts=hosts,
        )
        engines.append(engine)
        return engine

    found: list[TextParts] = []
    try:
        # Load the text parts while the engine loads its weights.
        first_ready = start(0).wait_until_ready(
            lambda folder: found.append(load_text_parts(config.model, folder))
        )
        if replicas_share_memory(environments):
            # The first engine has allocated its share of the memory, so the others must not derive
            # their size from the rest.
            configs = [same_sized_config(each, first_ready) for each in configs]
        # Start the others only now, so that they find the programs that the first has compiled.
        for idx in range(1, len(environments)):
            start(idx)
        readies = [engine.wait_until_ready(lambda folder: None) for engine in engines[1:]]
    except BaseException:
        for engine in engines:
            engine.close()
        if hosts is not None:
            hosts.close()
        raise
    (text,) = found
    if len(engines) == 1:
        return StartedEngines(transport=engines[0], ready=first_ready, text=text)
    transport = DataParallelTransport(
        list(zip(engines, [first_ready, *readies], strict=True)),
        have_prefix_caches=config.cache.enable_prefix_caching,
    )
    return StartedEngines(transport=transport, ready=transport.ready, text=text)


def build_async_client(
    config: EngineConfig, server_config: ServerConfig, *, show_progress: bool = False
) -> AsyncEngineClient:
    """Starts the engines and builds their asyncio client. Call the client's `start` on its loop.

    Args:
        show_progress: Draw a progress bar on stderr while programs compile.

    Raises:
        ConfigError: As for `start_engines`.
        EngineDeadError: As for `start_engines`.
    """
    policy = RestartPolicy(
        max_restarts=server_config.max_engine_restarts,
        window_s=server_config.engine_restart_window_s,
    )
    engines = start_engines(
        config,
        policy,
        max_step_s=server_config.execute_model_timeout_s,
        max_idle_start_s=server_config.engine_ready_timeout_s,
        stall_s=server_config.max_step_seconds,
        show_progress=show_progress,
    )
    ready, text = engines.ready, engines.text
    log_sampling_defaults(ready.model_info)
    log_feature_uses(ready.model_info)
    generation_config = ready.model_info.sampling_defaults.generation_config
    try:
        return AsyncEngineClient(
            engines.transport,
            make_input_processor(
                ready, text.tokenizer, default_max_tokens=generation_config.max_new_tokens
            ),
            OutputProcessor(
                text.tokenizer,
                num_engines=config.parallel.data_parallel_size,
                packs_logprobs=True,
            ),
            ready.model_info,
            tokenizer=text.tokenizer,
            chat_template=text.chat_template,
            max_waiting_bytes=server_config.max_unread_bytes,
        )
    except BaseException:
        engines.transport.close()
        raise
