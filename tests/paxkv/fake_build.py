"""Stand-ins for the parts of an engine that need a device: a model and a runner that echo."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from paxkv.config.engine_config import EngineConfig
from paxkv.config.model_config import ModelConfig
from paxkv.config.sampling_defaults import GenerationConfig, SamplingDefaults
from paxkv.contracts.engine_start import EngineReady, ModelInfo
from paxkv.contracts.kv_cache_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from paxkv.engine.core_thread import CoreThread
from paxkv.entrypoints.build_client import StartedEngines, TextParts
from paxkv.errors import KVCacheTooSmallError
from tests.paxkv.engine.fake_engine import FakeExecutor, make_engine_core
from tests.paxkv.text.small_tokenizers import BOS, EOS, byte_level_backend

MAX_POSITIONS, MAX_SCALED_POSITIONS = 64, 128
VOCAB_SIZE = 258


class FakeRunner(FakeExecutor):
    """Takes a runner's arguments and echoes prompts."""

    instances: list["FakeRunner"] = []
    fails_at_step: int | None = None
    model: SimpleNamespace
    max_drafts = 0
    # Longest request that the memory it measures has room for.
    max_fitting_len = 10**9

    def __init__(self, model: object, **arguments: object) -> None:
        max_model_len = arguments["max_model_len"]
        self.arguments = arguments
        self.is_warm = False
        cache_config = arguments["cache_config"]
        spec = FullAttentionSpec(
            block_size=cache_config.block_size or 16,
            num_kv_heads=1,
            head_size=8,
            dtype="float32",
        )
        group = KVCacheGroupSpec(layer_names=("layers.0",), kv_cache_spec=spec)
        kv_cache_config = KVCacheConfig(
            num_blocks=cache_config.num_gpu_blocks_override or 65, kv_cache_groups=(group,)
        )
        super().__init__(kv_cache_config, fails_at_step=self.fails_at_step)
        fitting_len = min(self.max_fitting_len, (kv_cache_config.num_blocks - 1) * spec.block_size)
        if arguments["may_be_shorter"]:
            max_model_len = min(max_model_len, fitting_len)
        elif max_model_len > self.max_fitting_len:
            raise KVCacheTooSmallError(f"no room for {max_model_len}")
        self.memory_plan = SimpleNamespace(
            report=lambda: "KV cache: fake",
            num_devices=1,
            pool_bytes=kv_cache_config.num_blocks * spec.page_size_bytes,
            max_model_len=max_model_len,
            num_longest_reqs=(kv_cache_config.num_blocks - 1) * spec.block_size // max_model_len,
        )
        self.kernel_choice = SimpleNamespace(
            why_no_kernels="the runner is a fake.", ops_without_kernels=()
        )
        self.instances.append(self)

    def warm_up(self) -> None:
        self.is_warm = True


def fake_model_parts(monkeypatch: pytest.MonkeyPatch) -> type[FakeRunner]:
    """Replaces the model and the runner that an engine is built of; returns the runner's class."""

    config = SimpleNamespace(
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=MAX_POSITIONS,
        max_scaled_positions=MAX_SCALED_POSITIONS,
        eos_token_ids=(257,),
    )
    loaded = SimpleNamespace(
        config=config,
        device_bytes=2_000,
        class_name="models.families.fake.FakeForCausalLM",
    )
    loaded.without_tokens = lambda token_ids: loaded
    loaded.describe_weights = lambda: "weights: none"

    class Runner(FakeRunner):
        instances = []
        model = loaded

    build_model = "paxkv.entrypoints.build_model"
    monkeypatch.setattr(f"{build_model}.load_model", lambda folder, **arguments: loaded)
    monkeypatch.setattr(f"{build_model}.read_model_config", lambda folder, **arguments: config)
    monkeypatch.setattr("paxkv.entrypoints.build_runner.ModelRunner", Runner)
    return Runner


def config_for(folder: Path, **model: object) -> EngineConfig:
    return EngineConfig(model=ModelConfig(model=str(folder), **model))


def started_fake(**sampling_defaults: object) -> StartedEngines:
    """An engine in a thread instead of processes, whose model has these defaults and no text."""
    core = make_engine_core()
    model_info = ModelInfo(
        served_model_name="fake",
        model="fake",
        max_model_len=256,
        vocab_size=VOCAB_SIZE,
        max_fitting_tokens=512,
        created=0,
        max_num_seqs=8,
        cache_settings={},
        sampling_defaults=SamplingDefaults(generation_config=GenerationConfig(**sampling_defaults)),
    )
    ready = EngineReady(
        model_info=model_info, eos_token_ids=(), max_prompt_tokens=None, stats=core.make_stats()
    )
    text = TextParts(tokenizer=None, chat_template=None)
    return StartedEngines(transport=CoreThread(core), ready=ready, text=text)


def save_tokenizer(folder: Path, *, chat_template: str | None = None) -> None:
    byte_level_backend().save(str(folder / "tokenizer.json"))
    config = {"bos_token": BOS, "eos_token": EOS, "add_bos_token": True}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
