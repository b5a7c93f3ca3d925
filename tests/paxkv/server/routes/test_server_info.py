"""Settings and software under vLLM's keys: only for operators, and without secrets."""

import dataclasses
import importlib.metadata
import json

import pytest

from paxkv.config.cache_config import CacheConfig
from paxkv.config.engine_config import EngineConfig
from paxkv.config.model_config import ModelConfig
from paxkv.config.sampling_defaults import GenerationConfig
from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.server.routes.server_info import engine_settings
from tests.paxkv.server.fake_engine import FakeEngine

SECRET = "geheim"


def test_it_does_not_exist_unless_enabled(shared_server):
    assert shared_server.client.get("/server_info").status_code == 404


def test_it_needs_a_key_if_keys_are_set_and_never_shows_them(start_server, monkeypatch):
    monkeypatch.setenv("PAXKV_API_KEY", SECRET)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("HF_HOME", "/of/models")
    server = start_server(enable_admin=True, api_key=(SECRET,))
    assert server.client.get("/server_info").status_code == 401
    for config_format in ("text", "json"):
        answer = server.client.get(
            f"/server_info?config_format={config_format}",
            headers={"Authorization": f"Bearer {SECRET}"},
        )
        assert answer.status_code == 200
        assert SECRET not in answer.text and "api_key" not in answer.text.lower()


def test_formats_and_keys_are_vllms(start_server):
    client = start_server(enable_admin=True).client
    info = client.get("/server_info?config_format=json").json()
    assert set(info) == {"vllm_config", "vllm_env", "system_env"}
    assert info["vllm_config"]["model_config"]["max_model_len"] == 512
    assert info["vllm_config"]["cache_config"] == {"block_size": 16}
    assert info["vllm_env"] == {}
    assert f"jax=={importlib.metadata.version('jax')}" in info["system_env"]["pip_packages"]
    text = client.get("/server_info").json()
    assert "model_config.max_model_len=512" in text["vllm_config"]
    assert text["system_env"] == info["system_env"]
    refused = client.get("/server_info?config_format=yaml")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "config_format")
    assert client.post("/server_info").status_code == 405


def test_settings_are_the_given_ones_with_what_the_engine_decided():
    config = EngineConfig(
        model=ModelConfig(
            served_model_name=("other",),
            hf_token=SECRET,
            override_generation_config=GenerationConfig(top_k=5),
        ),
        cache=CacheConfig(prefix_caching_seed=SECRET, num_gpu_blocks_override=7),
        scheduler=SchedulerConfig(max_num_seqs=5),
    )
    settings = engine_settings(FakeEngine().model_info, config)
    assert set(settings) == {
        *("model_config", "cache_config", "scheduler_config", "runner_config"),
        "parallel_config",
    }
    assert settings["scheduler_config"]["max_num_seqs"] == 5
    assert settings["cache_config"]["num_gpu_blocks_override"] == 7
    assert settings["cache_config"]["block_size"] == 16
    assert settings["model_config"]["served_model_name"] == ["org/fake"]
    assert settings["model_config"]["max_model_len"] == 512
    assert settings["model_config"]["override_generation_config"]["top_k"] == 5
    assert "prefix_caching_seed" not in settings["cache_config"]
    assert SECRET not in json.dumps(settings)


@pytest.mark.parametrize("name", ["block_size", "num_gpu_blocks"])
def test_counts_are_present_if_the_engine_reported_them(name):
    info = dataclasses.replace(FakeEngine().model_info, cache_settings={name: "12"})
    assert engine_settings(info, None)["cache_config"] == {name: 12}
