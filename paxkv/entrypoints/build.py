"""Constructs the objects of an engine and connects them.

`build_client.py` constructs the objects that need no JAX.
"""

import dataclasses
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path

from paxkv.client.inproc_client import InprocClient
from paxkv.client.input_processor import InputProcessor
from paxkv.client.output_processor import OutputProcessor
from paxkv.config.cache_config import CacheConfig
from paxkv.config.engine_config import EngineConfig
from paxkv.config.generation_config import find_sampling_defaults
from paxkv.config.model_config import ModelConfig
from paxkv.config.runner_config import RunnerConfig
from paxkv.config.sampling_defaults import SamplingDefaults
from paxkv.contracts.engine_start import EngineReady, ModelInfo
from paxkv.contracts.kv_cache_spec import KVCacheConfig, MambaSpec
from paxkv.contracts.protocols import GrammarGate
from paxkv.contracts.rank_place import RankPlace
from paxkv.contracts.wire import EngineTransport
from paxkv.engine.core_thread import CoreThread
from paxkv.engine.engine_core import EngineCore
from paxkv.engine.feature_use import find_feature_uses
from paxkv.engine.kv_event_publisher import KVEventPublisher, make_kv_event_publisher
from paxkv.entrypoints.build_client import (
    TextParts,
    find_grammar_setup,
    load_text_parts,
    load_tokenizer,
    log_feature_uses,
    log_sampling_defaults,
    make_input_processor,
    start_engines,
)
from paxkv.entrypoints.build_scheduler import make_scheduler, record_scheduler
from paxkv.errors import ConfigError, InvariantError
from paxkv.fleet.engine_supervisor import RestartPolicy
from paxkv.fleet.loop_thread import LoopThread
from paxkv.package_origin import check_package_origin
from paxkv.scheduler.scheduler import Scheduler
from paxkv.structured_output.grammar_compiler import GrammarCompiler
from paxkv.structured_output.grammar_manager import GrammarManager
from paxkv.text.chat_template import ChatTemplate
from paxkv.text.tokenizer import Tokenizer
from paxkv.trace.header import TraceHeader
from paxkv.trace.recorder import TraceRecorder
from paxkv.trace.trace_file import check_trace_file

# Before the imports below, which fail without an explanation if another package is named `models`.
check_package_origin()

from paxkv.entrypoints.build_drafter import load_drafter  # noqa: E402
from paxkv.entrypoints.build_model import (  # noqa: E402
    find_model_folder,
    find_text_folder,
    load_target,
)
from paxkv.entrypoints.build_runner import make_runner  # noqa: E402
from paxkv.runner.model_runner import ModelRunner  # noqa: E402
from paxkv.runner.programs.program_store import (  # noqa: E402
    NewCompiledPrograms,
    choose_store,
)
from paxkv.runner.ranks.join_group import join_group  # noqa: E402
from paxkv.runner.ranks.rank_group import RankGroup  # noqa: E402
from paxkv.runner.shapes.bucket_sizes import INVARIANT_TILE_TOKENS  # noqa: E402

logger = logging.getLogger(__name__)

DEMO_MODEL_NAME = "paxkv-demo"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BuiltCore:
    """An engine core that does not run yet, and the data that its clients need."""

    core: EngineCore
    ready: EngineReady


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BuiltEngine:
    """A running engine, and the objects that its client needs."""

    transport: EngineTransport
    input_processor: InputProcessor
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    model_info: ModelInfo
    num_engines: int = 1


def build_engine(config: EngineConfig, *, show_progress: bool = False) -> BuiltEngine:
    """Loads the model, compiles all programs, and starts the engine in a thread of this process.

    Several engines run in separate processes, because threads of one process would take turns.

    Args:
        show_progress: Draw a progress bar on stderr while programs compile.

    Raises:
        ConfigError: The settings do not fit the model or the device, or an engine process cannot
            load the model.
        ModelError: The model cannot be loaded.
        EngineDeadError: An engine's process ended before it was ready.
    """
    if config.parallel.data_parallel_size > 1 or config.parallel.nnodes > 1:
        return _build_engines(config, show_progress=show_progress)
    found: list[TextParts] = []
    built = build_core(
        config,
        show_progress=show_progress,
        on_model_found=lambda folder: found.append(load_text_parts(config.model, folder)),
    )
    (text,) = found
    log_sampling_defaults(built.ready.model_info)
    log_feature_uses(built.ready.model_info)
    return BuiltEngine(
        transport=CoreThread(built.core),
        input_processor=make_input_processor(built.ready, text.tokenizer),
        tokenizer=text.tokenizer,
        chat_template=text.chat_template,
        model_info=built.ready.model_info,
    )


def _build_engines(config: EngineConfig, *, show_progress: bool) -> BuiltEngine:
    engines = start_engines(
        config, RestartPolicy(max_restarts=0, window_s=math.inf), show_progress=show_progress
    )
    transport = LoopThread(engines.transport)
    try:
        input_processor = make_input_processor(engines.ready, engines.text.tokenizer)
    except BaseException:
        transport.close()
        raise
    log_sampling_defaults(engines.ready.model_info)
    log_feature_uses(engines.ready.model_info)
    return BuiltEngine(
        transport=transport,
        input_processor=input_processor,
        tokenizer=engines.text.tokenizer,
        chat_template=engines.text.chat_template,
        model_info=engines.ready.model_info,
        num_engines=config.parallel.data_parallel_size,
    )


def build_core(
    config: EngineConfig,
    *,
    show_progress: bool = False,
    on_model_found: Callable[[Path], None] = lambda folder: None,
    place: RankPlace | None = None,
) -> BuiltCore:
    """Loads the model and compiles all programs.

    Args:
        place: Of the leader of a group. None: this process computes alone.
        on_model_found: Called before the weights are loaded, with the folder of the model's
            tokenizer and chat template.

    Raises:
        ConfigError: The settings do not fit the model or the device.
        ModelError: The model cannot be loaded.
    """
    # Report an unusable file or port now, and not after minutes of loading.
    if config.scheduler.trace_file is not None:
        check_trace_file(Path(config.scheduler.trace_file))
    kv_event_publisher = make_kv_event_publisher(config.cache.kv_events)
    try:
        return _build_core(
            config,
            kv_event_publisher,
            show_progress=show_progress,
            on_model_found=on_model_found,
            group=None if place is None else join_group(place),
        )
    except BaseException:
        if kv_event_publisher is not None:
            kv_event_publisher.close()
        raise


def compile_programs(config: EngineConfig, path: Path, *, show_progress: bool = False) -> int:
    """Compiles all programs of an engine into a folder for `RunnerConfig.compiled_dir`.

    Returns:
        The number of programs.

    Raises:
        ConfigError: The folder cannot be used, or the settings do not fit the model or the device.
        ModelError: The model cannot be loaded.
    """
    if config.parallel.nnodes > 1:
        raise ConfigError(
            f"programs of nnodes={config.parallel.nnodes} hosts cannot be compiled ahead: each "
            "host stores its programs in --compilation-cache-dir when it starts."
        )
    store = NewCompiledPrograms(path)  # first, because it fails immediately
    folder = find_model_folder(config)
    # Programs do not need sampling defaults, but an engine with invalid defaults could not start.
    _find_sampling_defaults(config, folder)
    tokenizer = load_tokenizer(find_text_folder(config.model, folder))
    model = load_target(config, folder, tokenizer)
    head = load_drafter(config, model, folder)
    runner = make_runner(config, model, store, head=head, show_progress=show_progress)
    _find_num_lookahead_tokens(config.runner, runner)  # raises, as an engine would
    return runner.warm_up()


def _build_core(
    config: EngineConfig,
    kv_event_publisher: KVEventPublisher | None,
    *,
    show_progress: bool,
    on_model_found: Callable[[Path], None],
    group: RankGroup | None,
) -> BuiltCore:
    store = choose_store(config.runner)
    folder = find_model_folder(config)
    text_folder = find_text_folder(config.model, folder)
    on_model_found(text_folder)
    # Report mistakes in small files before the weights are loaded, which takes minutes.
    sampling_defaults = _find_sampling_defaults(config, folder)
    tokenizer = load_tokenizer(text_folder)
    model = load_target(config, folder, tokenizer)
    head = load_drafter(config, model, folder)
    runner = make_runner(config, model, store, head=head, show_progress=show_progress, group=group)
    _warn_of_unused_state_dtypes(config.cache, runner.kv_cache_config)
    max_model_len = runner.memory_plan.max_model_len
    num_lookahead_tokens = _find_num_lookahead_tokens(config.runner, runner)
    runner.warm_up()
    grammar_setup = find_grammar_setup(
        tokenizer, model.config.eos_token_ids, model.config.vocab_size
    )
    grammars = GrammarManager(GrammarCompiler(**grammar_setup)) if grammar_setup else None
    header = TraceHeader(
        scheduler_config=config.scheduler,
        cache_config=config.cache,
        kv_cache_config=runner.kv_cache_config,
        max_model_len=max_model_len,
        is_async=config.scheduler.async_scheduling,
        num_lookahead_tokens=num_lookahead_tokens,
        # A hit of a model with states can end only where a state is saved, and often none is saved
        # one block earlier. So these models keep the last block.
        use_eagle=head is not None and head.reads_hidden and not runner.kv_cache_config.has_states,
    )
    scheduler = _make_scheduler(header, config.scheduler.trace_file, grammars)
    core = _make_core(config, scheduler, runner, kv_event_publisher, grammars)
    names = _model_names(config.model)
    model_info = ModelInfo(
        served_model_name=names[0],
        other_model_names=names[1:],
        model=config.model.model or DEMO_MODEL_NAME,
        max_model_len=max_model_len,
        vocab_size=model.config.vocab_size,
        max_fitting_tokens=scheduler.limits.max_tokens_that_fit,
        created=int(time.time()),
        max_num_seqs=config.scheduler.max_num_seqs,
        cache_settings=_cache_settings(config.cache, runner.kv_cache_config),
        max_logprobs=config.runner.max_logprobs,
        sampling_defaults=sampling_defaults,
        feature_uses=find_feature_uses(
            config,
            runner.kv_cache_config,
            max_model_len=max_model_len,
            num_positions=model.config.max_scaled_positions,
            why_no_kernels=runner.kernel_choice.why_no_kernels,
            ops_without_kernels=runner.kernel_choice.ops_without_kernels,
        ),
        saves_states=scheduler.kv_cache_manager.saves_states,
    )
    ready = EngineReady(
        model_info=model_info,
        eos_token_ids=tuple(model.config.eos_token_ids),
        max_prompt_tokens=scheduler.limits.max_prompt_tokens,
        stats=core.make_stats(),
    )
    return BuiltCore(core=core, ready=ready)


def _warn_of_unused_state_dtypes(cache: CacheConfig, found: KVCacheConfig) -> None:
    if any(isinstance(group.kv_cache_spec, MambaSpec) for group in found.kv_cache_groups):
        return
    for name in ("mamba_cache_dtype", "mamba_ssm_cache_dtype"):
        if getattr(cache, name) != "auto":
            logger.warning("%s has no effect: no layer of the model is recurrent.", name)


def build_follower_runner(config: EngineConfig, place: RankPlace) -> ModelRunner:
    """Joins a group, loads this process's part of the model, and compiles all programs.

    Raises:
        ConfigError: The settings do not fit the model, the device or the other processes.
        ModelError: The model cannot be loaded.
    """
    store = choose_store(config.runner)
    folder = find_model_folder(config)
    tokenizer = load_tokenizer(find_text_folder(config.model, folder))
    group = join_group(place)
    model = load_target(config, folder, tokenizer)
    head = load_drafter(config, model, folder)
    runner = make_runner(config, model, store, head=head, show_progress=False, group=group)
    runner.warm_up()
    return runner


def build_llm_client(engine: BuiltEngine) -> InprocClient:
    """The synchronous client of a built engine."""
    return InprocClient(
        engine.transport, OutputProcessor(engine.tokenizer, num_engines=engine.num_engines)
    )


def _find_sampling_defaults(config: EngineConfig, folder: Path) -> SamplingDefaults:
    return find_sampling_defaults(
        config.model.generation_config, config.model.override_generation_config, folder
    )


def _cache_settings(config: CacheConfig, kv_cache_config: KVCacheConfig) -> dict[str, str]:
    """Label values of `vllm:cache_config_info`, including values chosen at the start."""
    block_sizes = {group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups}
    settings = dataclasses.asdict(config) | {
        "block_size": min(block_sizes),
        "num_gpu_blocks": kv_cache_config.num_blocks,
        # vLLM's name.
        "cache_dtype": config.kv_cache_dtype,
    }
    # Readers of metrics must not be able to compute block hashes, or see addresses of endpoints.
    hidden = {"prefix_caching_seed", "kv_events_config", "kv_cache_dtype"}
    return {name: str(value) for name, value in sorted(settings.items()) if name not in hidden}


def _model_names(config: ModelConfig) -> tuple[str, ...]:
    return config.served_model_name or (config.model or DEMO_MODEL_NAME,)


def _find_num_lookahead_tokens(config: RunnerConfig, runner: ModelRunner) -> int:
    """Most drafts that the scheduler schedules for a request in a step.

    Raises:
        ConfigError: The model has recurrent layers, and the settings allow too many drafts for
            batch-invariant steps.
        InvariantError: The runner verifies another number of drafts.
    """
    speculative = config.speculative_config
    num_drafts = 0 if speculative is None else speculative.num_speculative_tokens
    if num_drafts != runner.max_drafts:
        raise InvariantError(
            f"the settings allow {num_drafts} drafts, but the runner's step features propose up to "
            f"{runner.max_drafts}."
        )
    if num_drafts > 0 and runner.kv_cache_config.has_states:
        _check_drafts_of_states(config, num_drafts)
    return num_drafts


def _check_drafts_of_states(config: RunnerConfig, num_drafts: int) -> None:
    if config.batch_invariant and num_drafts > INVARIANT_TILE_TOKENS:
        raise ConfigError(
            f"num_speculative_tokens is {num_drafts}; with batch_invariant, models with recurrent "
            f"layers verify at most {INVARIANT_TILE_TOKENS} drafts of a request in a step. Set a "
            "smaller number."
        )


def _make_scheduler(
    header: TraceHeader, trace_file: str | None, grammar_gate: GrammarGate | None
) -> Scheduler | TraceRecorder:
    if trace_file is None:
        return make_scheduler(header, grammar_gate=grammar_gate)
    return record_scheduler(header, Path(trace_file), grammar_gate=grammar_gate)


def _make_core(
    config: EngineConfig,
    scheduler: Scheduler | TraceRecorder,
    runner: ModelRunner,
    kv_event_publisher: KVEventPublisher | None,
    grammars: GrammarManager | None,
) -> EngineCore:
    speculative = config.runner.speculative_config
    always_drafts = speculative is not None and speculative.prevents_bursts
    has_bursts = not config.runner.batch_invariant and not always_drafts
    return EngineCore(
        scheduler,
        runner,
        kv_event_publisher,
        grammars=grammars,
        max_steps_in_flight=2 if config.scheduler.async_scheduling else 1,
        max_decode_burst=config.scheduler.max_decode_burst if has_bursts else 1,
    )
