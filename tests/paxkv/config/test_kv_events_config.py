"""Settings of KV cache events that cannot work are refused, with what is allowed."""

import pytest

from paxkv.config.cache_config import CacheConfig
from paxkv.config.kv_events_config import KVEventsConfig
from paxkv.errors import ConfigError


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
