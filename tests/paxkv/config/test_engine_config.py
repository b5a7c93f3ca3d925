"""A config is checked when it is built. The error says what is allowed."""

import pytest

from paxkv.config.engine_config import (
    CacheConfig,
    EngineConfig,
    KVEventsConfig,
    ModelConfig,
    ParallelConfig,
    RunnerConfig,
    SchedulerConfig,
    ServerConfig,
)
from paxkv.config.speculative_config import SpeculativeConfig
from paxkv.errors import ConfigError


def test_defaults_are_valid() -> None:
    config = EngineConfig()
    assert config.cache.enable_prefix_caching
    assert config.scheduler.policy == "fcfs"


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: CacheConfig(kv_cache_dtype="fp8"), "kv_cache_dtype"),
        (lambda: CacheConfig(mamba_cache_dtype="fp8"), "mamba_cache_dtype"),
        (lambda: CacheConfig(mamba_ssm_cache_dtype="half"), "mamba_ssm_cache_dtype"),
        (lambda: CacheConfig(block_size=12), "block_size"),
        (lambda: CacheConfig(block_size=16.0), "block_size"),
        (lambda: CacheConfig(enable_prefix_caching="no"), "enable_prefix_caching"),
        (lambda: CacheConfig(num_gpu_blocks_override=1), "num_gpu_blocks_override"),
        (lambda: CacheConfig(gpu_memory_utilization=0.0), "gpu_memory_utilization"),
        (lambda: CacheConfig(gpu_memory_utilization=1.5), "gpu_memory_utilization"),
        (lambda: CacheConfig(gpu_memory_utilization="most"), "gpu_memory_utilization"),
        (lambda: CacheConfig(gpu_memory_utilization=float("nan")), "gpu_memory_utilization"),
        (lambda: SchedulerConfig(enable_chunked_prefill=1), "enable_chunked_prefill"),
        (lambda: SchedulerConfig(max_num_seqs=0), "max_num_seqs"),
        (lambda: SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=4), "max_num_seqs=8"),
        (lambda: SchedulerConfig(policy="lottery"), "fcfs, priority"),
        (lambda: RunnerConfig(kernels="triton"), "kernels must be one of auto, xla"),
        (lambda: RunnerConfig(enable_compilation_cache=1), "enable_compilation_cache must be"),
        (
            lambda: RunnerConfig(enable_compilation_cache=False, compilation_cache_dir="a"),
            "compilation_cache_dir='a' is set, but",
        ),
        (
            lambda: RunnerConfig(compiled_dir="a", compilation_cache_dir="b"),
            "compiled_dir='a' and compilation_cache_dir='b' are both set",
        ),
        (lambda: ModelConfig(dtype="int3"), "float32"),
        (lambda: ModelConfig(max_model_len=1), "max_model_len"),
        (lambda: ModelConfig(served_model_name="a"), "served_model_name must be a list"),
        (lambda: ModelConfig(served_model_name=("a", "")), "served_model_name must be a list"),
        (lambda: ModelConfig(served_model_name=("a", "b")), "no model is named"),
        (lambda: ModelConfig(generation_config=""), "generation_config must be auto"),
        (lambda: ModelConfig(model_impl="vllm"), "auto, module:Class .*, got 'vllm'"),
        (lambda: ModelConfig(model_impl="transformers"), "there are no other implementations"),
        (lambda: ModelConfig(model_impl="my_model:"), "my_model:MyModel.*, got 'my_model:'"),
        (lambda: ModelConfig(model_impl=":MyModel"), "model_impl must be"),
        (lambda: ModelConfig(model_impl=7), "model_impl must be"),
        (lambda: ModelConfig(seed=2**63), "seed"),
        (lambda: ModelConfig(seed="lucky"), "seed"),
        (lambda: ServerConfig(port=70000), "65535"),
        (lambda: ServerConfig(port="http"), "65535"),
        (lambda: ServerConfig(shutdown_timeout_s=-1), "shutdown_timeout_s"),
        (lambda: ServerConfig(shutdown_timeout_s=float("inf")), "shutdown_timeout_s"),
    ],
)
def test_the_error_names_the_invalid_setting(make, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        make()


def test_kv_events_follow_the_json_and_are_off_by_default() -> None:
    assert CacheConfig().kv_events is None
    text = '{"endpoint": "tcp://127.0.0.1:1", "replay_endpoint": "ipc:///run/r", "topic": "kv"}'
    assert CacheConfig(kv_events_config=text).kv_events == KVEventsConfig(
        endpoint="tcp://127.0.0.1:1", replay_endpoint="ipc:///run/r", topic="kv"
    )
    assert CacheConfig(kv_events_config="{}").kv_events == KVEventsConfig()
    for off in ('{"enable_kv_cache_events": false}', '{"publisher": "null"}'):
        assert CacheConfig(kv_events_config=off).kv_events is None


@pytest.mark.parametrize("endpoint", ["tcp://*:0", "tcp://127.0.0.1:*", "tcp://[::1]:65535"])
def test_kv_events_config_accepts_every_valid_port(endpoint: str) -> None:
    assert KVEventsConfig(endpoint=endpoint).endpoint == endpoint


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tcp://127.0.0.1:5557", "not JSON"),
        ("[1]", "JSON object"),
        ("[" * 100_000, "not JSON"),
        ('{"endpont": 1, "hwn": 2}', "has no endpont, hwn; it has enable_kv_cache_events"),
        ('{"enable_kv_cache_events": "yes"}', "enable_kv_cache_events must be true or false"),
        ('{"publisher": "kafka"}', "publisher must be one of zmq, null"),
        ('{"publisher": null}', "publisher must be one of zmq, null"),
        ('{"endpoint": null}', "endpoint must be a ZeroMQ address"),
        ('{"endpoint": "127.0.0.1:5557"}', "endpoint must be a ZeroMQ address"),
        ('{"replay_endpoint": "udp://x"}', "replay_endpoint must be a ZeroMQ address"),
        ('{"endpoint": "tcp://127.0.0.1"}', "endpoint must end in a port"),
        ('{"endpoint": "tcp://127.0.0.1:port"}', "endpoint must end in a port"),
        ('{"replay_endpoint": "tcp://*:65536"}', "replay_endpoint must end in a port"),
        ('{"buffer_steps": 0}', "buffer_steps must be an integer"),
        ('{"hwm": 1.5}', "hwm must be an integer"),
        ('{"max_queue_size": true}', "max_queue_size must be an integer"),
        ('{"hwm": 2147483648}', "hwm must be an integer"),
        ('{"topic": 7}', "topic must be a string"),
        ('{"wire_format": 0.16}', "wire_format must be one of vllm-0.16, vllm-0.32, got 0.16"),
        ('{"block_hash_type": "hex"}', "block_hash_type must be one of int, bytes"),
        ('{"data_parallel_rank": -1}', "data_parallel_rank must be an integer of at least 0"),
    ],
)
def test_the_error_names_the_mistake_in_kv_events_config(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match="kv_events_config") as error:
        CacheConfig(kv_events_config=text)
    assert words in str(error.value)


def test_kv_events_need_prefix_caching() -> None:
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        CacheConfig(kv_events_config="{}", enable_prefix_caching=False)
    config = CacheConfig(kv_events_config='{"publisher": "null"}', enable_prefix_caching=False)
    assert config.kv_events is None


@pytest.mark.parametrize("share", [-0.1, 1.1, "some", True, float("nan")])
def test_kv_cache_metrics_sample_must_be_in_0_to_1(share: object) -> None:
    with pytest.raises(ConfigError, match="kv_cache_metrics_sample"):
        CacheConfig(kv_cache_metrics_sample=share)


@pytest.mark.parametrize("window_s", [0, -1.0, 3601, "some", True, float("nan")])
def test_expert_load_window_must_be_a_positive_number_of_seconds(window_s: object) -> None:
    with pytest.raises(ConfigError, match="expert_load_window must be a number of seconds"):
        RunnerConfig(expert_load_window=window_s)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3 is not a multiple of nnodes=2"),
        ({"node_rank": 2}, "node_rank must be below nnodes=2, got 2"),
        ({"data_parallel_size": 2}, "data_parallel_size=2 does not work with nnodes=2 yet"),
        ({"master_port": 0}, "master_port must be an integer of at least 1"),
        ({"master_port": 65536}, "master_port must be at most 65535, got 65536"),
    ],
)
def test_hosts_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        ParallelConfig(**{"tensor_parallel_size": 4, "nnodes": 2} | settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decode_context_parallel_size": 0}, "must be an integer of at least 1"),
        ({"decode_context_parallel_size": 3}, "size=3 must divide tensor_parallel_size=4"),
        ({"decode_context_parallel_size": 2, "nnodes": 2}, "does not work with nnodes=2 yet"),
    ],
)
def test_ranks_of_a_context_that_do_not_fit_are_refused(settings, message):
    ParallelConfig(tensor_parallel_size=4, decode_context_parallel_size=2)
    with pytest.raises(ConfigError, match=message):
        ParallelConfig(**{"tensor_parallel_size": 4} | settings)


def test_features_that_do_not_work_with_ranks_of_a_context_are_refused():
    parallel = ParallelConfig(tensor_parallel_size=2, decode_context_parallel_size=2)
    EngineConfig(parallel=parallel)
    ngram = SpeculativeConfig(method="ngram", num_speculative_tokens=1)
    for runner in (RunnerConfig(speculative_config=ngram), RunnerConfig(batch_invariant=True)):
        with pytest.raises(ConfigError, match="does not work with decode_context_parallel_size=2"):
            EngineConfig(parallel=parallel, runner=runner)


def test_features_that_do_not_work_on_several_hosts_are_refused():
    parallel = ParallelConfig(tensor_parallel_size=2, nnodes=2)
    EngineConfig(parallel=parallel, runner=RunnerConfig(max_logprobs=20))
    for runner, message in (
        (RunnerConfig(max_logprobs=21), "max_logprobs=21 does not work with nnodes=2"),
        (RunnerConfig(max_logprobs=-1), "max_logprobs=-1 does not work with nnodes=2"),
        (RunnerConfig(expert_load_window=5.0), "expert_load_window does not work with nnodes=2"),
    ):
        with pytest.raises(ConfigError, match=message):
            EngineConfig(parallel=parallel, runner=runner)


@pytest.mark.parametrize("token", ["", False, 5])
def test_hub_token_must_be_a_string_and_is_never_shown(token):
    with pytest.raises(ConfigError, match="hf_token must be an access token of the hub"):
        ModelConfig(hf_token=token)
    config = ModelConfig(hf_token="hf_geheim")
    assert config.hf_token == "hf_geheim" and "hf_geheim" not in repr(config)
