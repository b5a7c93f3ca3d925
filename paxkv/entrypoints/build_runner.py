"""Constructs the runner, with the memory that this machine has for the KV cache."""

import dataclasses
import logging

from models import LoadedModel
from models.loading.loaded_draft_model import LoadedDrafter
from models.platforms import default_platform
from paxkv.config.cache_config import CacheConfig
from paxkv.config.engine_config import EngineConfig
from paxkv.config.model_config import FIT_MEMORY
from paxkv.config.parallel_config import ParallelConfig
from paxkv.runner.memory.max_model_len import find_max_model_len
from paxkv.runner.memory.memory_plan import HostMemory, MemoryPlan
from paxkv.runner.model_runner import ModelRunner
from paxkv.runner.programs.program_store import CompiledPrograms, ProgramStore
from paxkv.runner.ranks.rank_group import RankGroup

logger = logging.getLogger(__name__)


def make_runner(
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
            "limit is %d. To confirm this length, set --max-model-len %d. For longer requests, "
            "compile programs for a larger length.",
            *(length, limit, length),
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
