"""Constructs the objects of an engine and connects them.

`build_client.py` constructs the objects that need no JAX.
"""

import contextlib
import dataclasses
import importlib.resources
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from paxkv.client.inproc_client import InprocClient
from paxkv.client.input_processor import InputProcessor
from paxkv.client.output_processor import OutputProcessor
from paxkv.config.engine_config import (
    AUTO_MODEL_IMPL,
    FIT_MEMORY,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    RunnerConfig,
)
from paxkv.config.generation_config import find_sampling_defaults, generation_config_folder
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

from models import LoadedModel, ModelError, load_model, read_model_config  # noqa: E402
from models import ModelConfig as TargetConfig  # noqa: E402
from models.config.eagle3_config import read_eagle3_config  # noqa: E402
from models.config.split_over_devices import check_context_ranks, check_split  # noqa: E402
from models.drafters.mtp_head import mtp_config  # noqa: E402
from models.loading.gguf.gguf_tokenizer import write_tokenizer_of  # noqa: E402
from models.loading.kernel_encoder import KernelEncoder  # noqa: E402
from models.loading.load_head import load_eagle3_head, load_mtp_head  # noqa: E402
from models.loading.loaded_draft_model import (  # noqa: E402
    LoadedDrafter,
    LoadedDraftModel,
    check_vocabulary,
)
from models.loading.mistral_tokenizer import (  # noqa: E402
    TEKKEN_FILE,
    write_tokenizer_of_tekken,
)
from models.loading.source import read_config_file, resolve_model_folder  # noqa: E402
from models.platforms import default_platform  # noqa: E402
from models.platforms.gpu import SHARE_VARIABLE  # noqa: E402
from paxkv.runner.memory.device_mesh import find_mesh  # noqa: E402
from paxkv.runner.memory.max_model_len import find_max_model_len  # noqa: E402
from paxkv.runner.memory.memory_plan import HostMemory, MemoryPlan  # noqa: E402
from paxkv.runner.model_runner import ModelRunner  # noqa: E402
from paxkv.runner.programs.program_store import (  # noqa: E402
    CompiledPrograms,
    NewCompiledPrograms,
    ProgramStore,
    choose_store,
    user_cache_folder,
)
from paxkv.runner.ranks.join_group import join_group  # noqa: E402
from paxkv.runner.ranks.rank_group import RankGroup  # noqa: E402

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

    Several engines run in one process each, because threads of one process would take turns.

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
    folder = _model_folder(config)
    # Programs do not need sampling defaults, but an engine with invalid defaults could not start.
    _find_sampling_defaults(config, folder)
    tokenizer = load_tokenizer(_text_folder(config.model, folder))
    model = _load_model(config, folder, tokenizer)
    head = _load_head(config, model, folder)
    runner = _make_runner(config, model, store, head=head, show_progress=show_progress)
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
    folder = _model_folder(config)
    text_folder = _text_folder(config.model, folder)
    on_model_found(text_folder)
    # Report mistakes in small files before the weights are loaded, which takes minutes.
    sampling_defaults = _find_sampling_defaults(config, folder)
    tokenizer = load_tokenizer(text_folder)
    model = _load_model(config, folder, tokenizer)
    head = _load_head(config, model, folder)
    runner = _make_runner(config, model, store, head=head, show_progress=show_progress, group=group)
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
        use_eagle=head is not None and head.reads_hidden,
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
    folder = _model_folder(config)
    tokenizer = load_tokenizer(_text_folder(config.model, folder))
    group = join_group(place)
    model = _load_model(config, folder, tokenizer)
    head = _load_head(config, model, folder)
    runner = _make_runner(config, model, store, head=head, show_progress=False, group=group)
    runner.warm_up()
    return runner


def build_llm_client(engine: BuiltEngine) -> InprocClient:
    """The synchronous client of a built engine."""
    return InprocClient(
        engine.transport, OutputProcessor(engine.tokenizer, num_engines=engine.num_engines)
    )


def _model_folder(config: EngineConfig) -> Path:
    """Finds the model's folder. Rejects unsupported models before weights are downloaded.

    Raises:
        ModelError: The model or its drafter cannot be found, or a config.json describes an
            unsupported model, or the drafter does not fit the model.
    """
    model = config.model
    if model.model is None:
        folder = _demo_folder("checkpoint")
    else:
        folder = resolve_model_folder(
            model.model, with_weights=False, revision=model.revision, token=model.hf_token
        )
    hf_config = read_model_config(
        folder,
        generation_folder=generation_config_folder(model.generation_config, folder),
        model_impl=model.model_impl,
    )
    num_devices = config.parallel.tensor_parallel_size
    check_split(hf_config, num_devices)
    check_context_ranks(hf_config, num_devices, config.parallel.decode_context_parallel_size)
    _check_drafter(config, hf_config)
    is_on_hub = model.model is not None and not Path(model.model).expanduser().is_dir()
    if is_on_hub and model.load_format != "dummy":
        folder = resolve_model_folder(
            model.model, with_weights=True, revision=model.revision, token=model.hf_token
        )
    return folder


def _text_folder(config: ModelConfig, model_folder: Path) -> Path:
    """The folder of the tokenizer and of its chat template.

    Raises:
        ModelError: The tokenizer cannot be found, or is Mistral's own and cannot be read.
    """
    if config.tokenizer is None and config.tokenizer_revision is None:
        found = model_folder
    else:
        found = resolve_model_folder(
            config.tokenizer or config.model or model_folder,
            with_weights=False,
            revision=config.tokenizer_revision,
            token=config.hf_token,
        )
    programs = user_cache_folder()
    cache = programs and programs.parent / "tokenizers"
    if found.is_file():
        # Without a tokenizer, the file itself stands for a folder that has none.
        return write_tokenizer_of(found, cache) or found
    tekken = found / TEKKEN_FILE
    has_other = (found / "tokenizer.json").is_file() or not tekken.is_file()
    return found if has_other else write_tokenizer_of_tekken(tekken, cache)


def _find_sampling_defaults(config: EngineConfig, folder: Path) -> SamplingDefaults:
    return find_sampling_defaults(
        config.model.generation_config, config.model.override_generation_config, folder
    )


def _load_model(config: EngineConfig, folder: Path, tokenizer: Tokenizer | None) -> LoadedModel:
    """Loads the model, and excludes tokens that its tokenizer does not have."""
    # JAX reads this variable when it first uses a GPU. It is the only way to limit JAX's memory.
    os.environ.setdefault(SHARE_VARIABLE, f"{config.cache.gpu_memory_utilization:g}")
    mesh = find_mesh(config.parallel.tensor_parallel_size)
    if config.parallel.enable_expert_parallel and mesh is None:
        logger.warning(
            "enable_expert_parallel has no effect with tensor_parallel_size=1: one device has all "
            "experts."
        )
    platform = default_platform()
    max_model_len = config.model.max_model_len
    model = load_model(
        folder,
        dtype=config.model.dtype,
        load_format=config.model.load_format,
        seed=config.model.seed,
        has_unified_kv=config.cache.disable_hybrid_kv_cache_manager,
        max_model_len=None if max_model_len == FIT_MEMORY else max_model_len,
        product_dtype=config.model.product_dtype,
        quantization=config.model.quantization,
        quantization_group_size=config.model.quantization_group_size,
        generation_folder=generation_config_folder(config.model.generation_config, folder),
        model_impl=config.model.model_impl,
        panel_width=platform.column_panel_width(batch_invariant=config.runner.batch_invariant),
        platform=platform,
        mesh=mesh,
        enable_expert_parallel=config.parallel.enable_expert_parallel,
    )
    logger.info("%s", model.describe_weights())
    is_own_class = model.class_name.startswith("models.families.")
    if config.model.model_impl != AUTO_MODEL_IMPL or not is_own_class:
        logger.info(
            "the model runs as the class %s (model_impl=%s).",
            *(model.class_name, config.model.model_impl),
        )
    if tokenizer is None:
        return model
    return model.without_tokens(tokenizer.ids_without_token(model.config.vocab_size))


def _has_head(config: EngineConfig) -> bool:
    speculative = config.runner.speculative_config
    return speculative is not None and speculative.is_on_device


def _check_drafter(config: EngineConfig, target: TargetConfig) -> None:
    """Rejects a drafter that does not fit the model, before any weights are downloaded."""
    if not _has_head(config):
        return
    with _named_errors():
        method = config.runner.speculative_config.method
        if method == "mtp":
            mtp_config(target)
            return
        folder = _drafter_folder(config, with_weights=False)
        if method == "eagle3":
            read_eagle3_config(read_config_file(folder), target)
        else:
            check_vocabulary(read_model_config(folder), target)


def _drafter_folder(config: EngineConfig, *, with_weights: bool) -> Path:
    """The folder of the head or of the smaller model that `speculative_config` names."""
    if config.runner.speculative_config.model is None:
        return _demo_folder("draft_head")
    return resolve_model_folder(
        config.runner.speculative_config.model,
        with_weights=with_weights,
        token=config.model.hf_token,
    )


def _demo_folder(name: str) -> Path:
    return Path(str(importlib.resources.files("models.demo") / name))


@contextlib.contextmanager
def _named_errors() -> Iterator[None]:
    """Adds the setting to errors about the drafter, which else read as errors about the model."""
    try:
        yield
    except ModelError as error:
        raise type(error)(f"speculative_config: {error}") from error


def _load_head(config: EngineConfig, model: LoadedModel, folder: Path) -> LoadedDrafter | None:
    """Loads the drafter with weights; None if the method of drafts has none."""
    if not _has_head(config):
        return None
    with _named_errors():
        head = _load_drafter(config, model, folder)
    logger.info("drafter: %s", head.describe_weights())
    return head


def _load_drafter(config: EngineConfig, model: LoadedModel, folder: Path) -> LoadedDrafter:
    mesh = find_mesh(config.parallel.tensor_parallel_size)
    encoder, method = _make_encoder(config), config.runner.speculative_config.method
    load_format, seed = config.model.load_format, config.model.seed
    if method == "mtp":
        return load_mtp_head(
            model, folder, load_format=load_format, seed=seed, encoder=encoder, mesh=mesh
        )
    if method == "eagle3":
        # Its weights show whether it has an embedding, so they are read with "dummy" too.
        head_folder = _drafter_folder(config, with_weights=True)
        return load_eagle3_head(model, head_folder, encoder=encoder, mesh=mesh)
    max_model_len = config.model.max_model_len
    draft_model = load_model(
        _drafter_folder(config, with_weights=load_format != "dummy"),
        dtype=model.dtype,
        load_format=load_format,
        seed=seed,
        has_unified_kv=config.cache.disable_hybrid_kv_cache_manager,
        max_model_len=None if max_model_len == FIT_MEMORY else max_model_len,
        product_dtype=encoder.product_dtype,
        quantization=encoder.quantization,
        quantization_group_size=encoder.group_size,
        panel_width=encoder.panel_width,
        platform=encoder.platform,
        mesh=mesh,
    )
    return LoadedDraftModel.of_model(draft_model, model)


def _make_encoder(config: EngineConfig) -> KernelEncoder:
    """The form of the model's kernels, for the kernels of its draft head."""
    platform, num_devices = default_platform(), config.parallel.tensor_parallel_size
    panel_width = platform.column_panel_width(batch_invariant=config.runner.batch_invariant)
    return KernelEncoder(
        platform=platform,
        product_dtype=config.model.product_dtype,
        panel_width=panel_width if num_devices == 1 else None,
        quantization=config.model.quantization,
        group_size=config.model.quantization_group_size,
        num_devices=num_devices,
    )


def _make_runner(
    config: EngineConfig,
    model: LoadedModel,
    store: ProgramStore | None,
    *,
    head: LoadedDrafter | None,
    show_progress: bool,
    group: RankGroup | None = None,
) -> ModelRunner:
    """Builds the runner. If `max_model_len` is not set, the longest that fits the KV cache is used.

    Raises:
        KVCacheTooSmallError: The KV cache has no room for one request of `max_model_len` tokens or,
            if that is not set, of two tokens.
    """
    host_memory = _host_memory(config.parallel, model)
    on_host = host_memory is not None
    cache_config = _cache_config(config.cache, store, on_host=on_host)

    setting, limit = config.model.max_model_len, find_max_model_len(None, model.config)
    is_given = setting not in (None, FIT_MEMORY)
    compiled = store.max_model_len if isinstance(store, CompiledPrograms) else None
    most = find_max_model_len(setting, model.config) if is_given else min(compiled or limit, limit)
    runner = ModelRunner(
        model,
        cache_config=cache_config,
        scheduler_config=config.scheduler,
        max_model_len=most,
        may_be_shorter=not is_given,
        seed=config.model.seed,
        runner_config=config.runner,
        host_memory=host_memory,
        program_store=store,
        show_progress=show_progress,
        head=head,
        group=group,
        num_context_ranks=config.parallel.decode_context_parallel_size,
    )
    plan = runner.memory_plan
    if not is_given:
        _log_shorter_length(
            plan,
            store,
            limit=limit,
            memory_flag=_memory_flag(cache_config, on_host=on_host),
            level=logging.WARNING if setting is None else logging.INFO,
        )
    pool_bytes = plan.pool_bytes * plan.num_devices // config.parallel.nnodes
    if on_host and pool_bytes > host_memory.free_bytes:
        logger.warning(
            "the KV cache may grow to %d MiB, but only %d MiB are free: the system may kill this "
            "process when they are used. Set a smaller --cpu-kv-cache-bytes or "
            "--num-gpu-blocks-override.",
            *(pool_bytes >> 20, host_memory.free_bytes >> 20),
        )
    logger.info("%s", plan.report())
    return runner


def _host_memory(config: ParallelConfig, model: LoadedModel) -> HostMemory | None:
    """Memory for the KV cache of one engine on a CPU; None on other devices.

    It is measured once per start, because free memory changes while an engine is built.
    """
    free_bytes = default_platform().free_host_bytes()
    if free_bytes is None:
        return None
    num_engines = config.data_parallel_size
    # Later engines load their weights afterwards, and use the first engine's number of blocks.
    num_devices = config.tensor_parallel_size // config.nnodes
    weight_bytes = model.device_bytes * num_devices if num_engines > 1 else 0
    return HostMemory.of_engines(free_bytes, num_engines=num_engines, weight_bytes=weight_bytes)


def _log_shorter_length(
    plan: MemoryPlan, store: ProgramStore | None, *, limit: int, memory_flag: str, level: int
) -> None:
    """Logs why `max_model_len` is below the model's limit, if it is, and how to change that.

    Args:
        memory_flag: The flag that sets the size of the KV cache.
    """
    length = plan.max_model_len
    if length >= limit:
        return
    if isinstance(store, CompiledPrograms):
        logger.log(
            level,
            "max_model_len is %d, the length for which the programs were compiled; the model's own "
            "limit is %d. Set --max-model-len to the first, or compile programs for the second.",
            *(length, limit),
        )
        return
    logger.log(
        level,
        "max_model_len is %d: the KV cache of %d MiB has no room for one request of the model's %d "
        "positions. For longer requests set a larger %s. To confirm this length, set "
        "--max-model-len %d.",
        *(length, plan.pool_bytes * plan.num_devices >> 20, limit, memory_flag, length),
    )


def _memory_flag(config: CacheConfig, *, on_host: bool) -> str:
    if config.num_gpu_blocks_override is not None:
        return "--num-gpu-blocks-override"
    return "--cpu-kv-cache-bytes" if on_host else "--gpu-memory-utilization"


def _cache_config(config: CacheConfig, store: ProgramStore | None, *, on_host: bool) -> CacheConfig:
    """Sets the number of blocks to that of compiled programs, if it would otherwise be measured.

    A measurement may give a different number at every start, and on accelerators it compiles the
    largest programs.
    """
    is_given = config.num_gpu_blocks_override is not None or (
        on_host and config.cpu_kv_cache_bytes is not None
    )
    if not is_given and isinstance(store, CompiledPrograms):
        return dataclasses.replace(config, num_gpu_blocks_override=store.num_blocks)
    return config


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
        ConfigError: The model or its draft model has recurrent states, which cannot go back to the
            last accepted draft.
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
        raise ConfigError(
            "speculative_config does not work with recurrent layers yet, which cannot go back "
            "after a rejected draft; the model or its draft model has some. Leave "
            "speculative_config out, or use a draft model without recurrent layers."
        )
    return num_drafts


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
