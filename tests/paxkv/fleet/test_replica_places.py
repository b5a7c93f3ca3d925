"""Each replica has its own GPU or cores, trace and port; too many are refused with the reason."""

import os

import pytest

from paxkv.config.cache_config import CacheConfig
from paxkv.config.engine_config import EngineConfig
from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.errors import ConfigError
from paxkv.fleet import replica_places
from paxkv.fleet.replica_places import replica_config, replica_environments


@pytest.fixture(autouse=True)
def any_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(replica_places, "_num_cores", lambda: 7)


@pytest.fixture
def gpus(tmp_path):
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    return tmp_path


def test_single_engine_gets_no_variables(tmp_path) -> None:
    assert replica_environments(1, devices=tmp_path) == [{}]


def test_each_replica_gets_an_equal_share_of_the_cores(tmp_path) -> None:
    assert replica_environments(2, devices=tmp_path) == [{"NPROC": "3"}] * 2
    assert replica_environments(7, devices=tmp_path / "none") == [{"NPROC": "1"}] * 7
    with pytest.raises(ConfigError, match="8 is more than the 7 processor cores"):
        replica_environments(8, devices=tmp_path)


def test_each_replica_gets_one_gpu(gpus, monkeypatch) -> None:
    def of(*sizes: int) -> list[str]:
        found = replica_environments(*sizes, devices=gpus)
        return [variables["CUDA_VISIBLE_DEVICES"] for variables in found]

    assert of(2) == ["0", "1"]
    with pytest.raises(ConfigError, match=r"3 is more than the 2 GPUs .*\(0, 1\)"):
        of(3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-1ab,5,2,-1,3")
    assert of(3) == ["5", "GPU-1ab", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4")
    assert of(2, 2) == ["0,1", "2,3"]
    with pytest.raises(ConfigError, match="size=3 times tensor_parallel_size=2 is more than the 5"):
        of(3, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-1ab,2")
    with pytest.raises(ConfigError):
        of(4)


def test_gpus_hidden_from_jax_or_cuda_are_not_used(gpus, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert replica_environments(2, devices=gpus) == [{"NPROC": "3"}] * 2
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert replica_environments(2, devices=gpus) == [{"NPROC": "3"}] * 2


def test_cuda_visible_devices_without_gpus_has_no_effect(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert replica_environments(2, devices=tmp_path) == [{"NPROC": "3"}] * 2


def test_tpus_are_refused(tmp_path, monkeypatch) -> None:
    (tmp_path / "accel0").touch()
    with pytest.raises(ConfigError, match="TPU"):
        replica_environments(2, devices=tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "tpu,cpu")
    with pytest.raises(ConfigError, match="TPU"):
        replica_environments(2, devices=tmp_path / "none")


def test_number_of_cores_respects_affinity_and_nproc(monkeypatch) -> None:
    monkeypatch.undo()
    monkeypatch.delenv("NPROC", raising=False)
    assert replica_places._num_cores() == len(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 4})
    for named in ("", "0", "64", "all"):
        monkeypatch.setenv("NPROC", named)
        assert replica_places._num_cores() == 3
    monkeypatch.setenv("NPROC", "1")
    assert replica_places._num_cores() == 1


def test_each_replica_has_its_own_trace_file_and_ports() -> None:
    events = '{"endpoint": "tcp://*:5557", "replay_endpoint": "ipc:///run/replay", "topic": "kv"}'
    config = EngineConfig(
        cache=CacheConfig(kv_events_config=events), scheduler=SchedulerConfig(trace_file="t.jsonl")
    )
    assert replica_config(config, 0) == config
    second = replica_config(config, 2)
    assert second.scheduler.trace_file == "t.jsonl.replica-2"
    events = second.cache.kv_events
    assert (events.endpoint, events.replay_endpoint) == (
        *("tcp://*:5559", "ipc:///run/replay.replica-2"),
    )
    assert (events.topic, events.data_parallel_rank) == ("kv", 2)
    both = '{"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}'
    events = replica_config(
        EngineConfig(cache=CacheConfig(kv_events_config=both)), 1
    ).cache.kv_events
    assert (events.endpoint, events.replay_endpoint) == ("tcp://*:5559", "tcp://*:5560")
    last = EngineConfig(cache=CacheConfig(kv_events_config='{"endpoint": "tcp://*:65535"}'))
    with pytest.raises(ConfigError, match="65536"):
        replica_config(last, 1)
    any_port = EngineConfig(cache=CacheConfig(kv_events_config='{"endpoint": "tcp://*:0"}'))
    assert replica_config(any_port, 1).cache.kv_events.endpoint == "tcp://*:0"
    plain = EngineConfig()
    assert replica_config(plain, 3) == plain
