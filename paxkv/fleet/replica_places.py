"""Devices and settings of each replica of a data-parallel engine."""

import dataclasses
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from paxkv.config.engine_config import EngineConfig
from paxkv.contracts.engine_start import EngineReady
from paxkv.errors import ConfigError

_VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
# The number of threads with which JAX computes on the CPU.
_NUM_THREADS = "NPROC"
_GPU_FILE = re.compile(r"nvidia\d+")
_TPU_FILE = re.compile(r"accel\d+")
_GPU_PLATFORMS = ("cuda", "gpu")
_TCP_PORT = re.compile(r"(tcp://.*:)(\d+)")


def replica_environments(
    num_replicas: int, gpus_per_replica: int = 1, *, devices: Path = Path("/dev")
) -> list[dict[str, str]]:
    """Returns the variables to add to the environment of each replica's process.

    By default JAX takes the memory of every visible GPU and uses every CPU core. So each replica
    sees GPUs of its own; without GPUs, it gets an equal share of the cores.

    Args:
        gpus_per_replica: `ParallelConfig.tensor_parallel_size`.
        devices: Folder of the device files.

    Raises:
        ConfigError: There are more replicas than GPUs, or than cores; or the device is a TPU.
    """
    if num_replicas == 1:
        return [{}]
    platforms = [name for name in os.environ.get("JAX_PLATFORMS", "").lower().split(",") if name]
    files = os.listdir(devices) if devices.is_dir() else []
    has_tpu = not platforms and any(_TPU_FILE.fullmatch(file) for file in files)
    if has_tpu or "tpu" in platforms[:1]:
        raise ConfigError(
            f"data_parallel_size={num_replicas} is not supported on TPUs. Leave it out, or set 1."
        )
    gpus = _visible_gpus(files) if not platforms or platforms[0] in _GPU_PLATFORMS else []
    if gpus:
        if num_replicas * gpus_per_replica > len(gpus):
            times = f" times tensor_parallel_size={gpus_per_replica}" * (gpus_per_replica > 1)
            raise ConfigError(
                f"data_parallel_size={num_replicas}{times} is more than the {len(gpus)} GPUs that "
                f"this process sees ({', '.join(gpus)}). Lower it, make more GPUs visible with "
                f"{_VISIBLE_GPUS}, or set JAX_PLATFORMS=cpu to run on the CPU."
            )
        starts = range(0, num_replicas * gpus_per_replica, gpus_per_replica)
        return [{_VISIBLE_GPUS: ",".join(gpus[i : i + gpus_per_replica])} for i in starts]
    num_cores = _num_cores()
    if num_replicas > num_cores:
        raise ConfigError(
            f"data_parallel_size={num_replicas} is more than the {num_cores} processor cores that "
            "this process may use, and no GPU is visible. Lower it."
        )
    return [{_NUM_THREADS: str(num_cores // num_replicas)}] * num_replicas


def replica_config(config: EngineConfig, replica: int) -> EngineConfig:
    """Returns the settings of one replica. Replica 0 uses `config` unchanged.

    The other replicas get trace files and endpoints of their own. Each replica publishes its KV
    cache events on the next port. If events can be replayed at a second port, the ports of
    consecutive replicas are far enough apart that no two endpoints share one.

    Raises:
        ConfigError: A port would exceed 65535.
    """
    if replica == 0:
        return config
    scheduler, cache = config.scheduler, config.cache
    if scheduler.trace_file is not None:
        trace_file = f"{scheduler.trace_file}.replica-{replica}"
        scheduler = dataclasses.replace(scheduler, trace_file=trace_file)
    events = cache.kv_events
    if events is not None:
        ports = [_port(endpoint) for endpoint in (events.endpoint, events.replay_endpoint)]
        distance = 1 if None in ports else abs(ports[0] - ports[1]) + 1
        events = dataclasses.replace(
            events,
            endpoint=_own_endpoint(events.endpoint, replica, distance),
            replay_endpoint=_own_endpoint(events.replay_endpoint, replica, distance),
            data_parallel_rank=events.data_parallel_rank + replica,
        )
        cache = dataclasses.replace(cache, kv_events_config=json.dumps(dataclasses.asdict(events)))
    return dataclasses.replace(config, scheduler=scheduler, cache=cache)


def replicas_share_memory(environments: Sequence[Mapping[str, str]]) -> bool:
    """True if replicas with these variables run on the CPU and share the host's memory."""
    return len(environments) > 1 and _NUM_THREADS in environments[0]


def same_sized_config(config: EngineConfig, ready: EngineReady) -> EngineConfig:
    """Sets the KV cache size and `max_model_len` in `config` to a running engine's values."""
    cache = dataclasses.replace(config.cache, num_gpu_blocks_override=ready.stats.num_blocks)
    model = dataclasses.replace(config.model, max_model_len=ready.model_info.max_model_len)
    return dataclasses.replace(config, cache=cache, model=model)


def _port(endpoint: str | None) -> int | None:
    """The port of an endpoint; None if it has no port or lets the system choose one."""
    match = _TCP_PORT.fullmatch(endpoint or "")
    return int(match[2]) or None if match else None


def _own_endpoint(endpoint: str | None, replica: int, distance: int) -> str | None:
    if endpoint is None:
        return None
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}.replica-{replica}"
    port = _port(endpoint)
    if port is None:
        return endpoint
    return f"{_TCP_PORT.fullmatch(endpoint)[1]}{port + replica * distance}"


def _visible_gpus(files: list[str]) -> list[str]:
    # CUDA numbers GPUs from 0, independent of the numbers in the names of the device files.
    found = [str(idx) for idx in range(sum(bool(_GPU_FILE.fullmatch(file)) for file in files))]
    named = os.environ.get(_VISIBLE_GPUS)
    if named is None or not found:
        return found
    gpus = [gpu.strip() for gpu in named.split(",")]
    # "-1" or an empty entry ends the list. Duplicates count once.
    return list(dict.fromkeys(itertools.takewhile(lambda gpu: gpu not in ("", "-1"), gpus)))


def _num_cores() -> int:
    """The number of processor cores that this process may use."""
    has_affinity = hasattr(os, "sched_getaffinity")
    num_cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    wanted = os.environ.get(_NUM_THREADS, "")
    return min(num_cores, int(wanted)) if wanted.isdecimal() and int(wanted) else num_cores
