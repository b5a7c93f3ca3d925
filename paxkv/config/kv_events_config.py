"""Endpoints and format of KV cache events."""

import dataclasses
import json
from typing import Literal

from paxkv.config.setting import at_least, one_of, true_or_false
from paxkv.errors import ConfigError

KVEventPublisherKind = Literal["zmq", "null"]
KVEventsWireFormat = Literal["vllm-0.16", "vllm-0.32"]
KVBlockHashType = Literal["int", "bytes"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """Endpoints and format of KV cache events. The fields are vLLM's, except the last three.

    Events contain the token ids of prompts, and subscribers need no password. So the default
    endpoint, unlike vLLM's, accepts only programs of the same machine.

    Args:
        enable_kv_cache_events: False publishes no events, as if there were no config.
        publisher: "null" drops events.
        endpoint: ZeroMQ address to publish on. `*` is every interface, and port 0 any free port.
        replay_endpoint: Address at which subscribers request missed batches; None for no replay.
        buffer_steps: Number of batches kept for replay.
        hwm: Number of batches kept for a slow subscriber. It misses further batches.
        max_queue_size: Number of batches that may wait to be sent. If there are more, the oldest
            is dropped.
        topic: Prefix of every message, by which subscribers can filter.
        wire_format: The version of vLLM whose subscribers can decode the events. "vllm-0.16"
            cannot name KV cache groups.
        block_hash_type: "int" sends the last 8 bytes of a hash as an integer, which is vLLM's
            default; "bytes" sends the whole hash.
        data_parallel_rank: Number sent with each batch. With `data_parallel_size`, replicas send
            their own numbers.
    """

    enable_kv_cache_events: bool = True
    publisher: KVEventPublisherKind = "zmq"
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    wire_format: KVEventsWireFormat = "vllm-0.16"
    block_hash_type: KVBlockHashType = "int"
    data_parallel_rank: int = 0

    def __post_init__(self) -> None:
        true_or_false("enable_kv_cache_events", self.enable_kv_cache_events)
        one_of("publisher", self.publisher, KVEventPublisherKind.__args__)
        _zmq_endpoint("endpoint", self.endpoint)
        if self.replay_endpoint is not None:
            _zmq_endpoint("replay_endpoint", self.replay_endpoint)
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value < 2**31:
                raise ConfigError(f"{name} must be an integer in [1, 2**31), got {value!r}.")
        if not isinstance(self.topic, str):
            raise ConfigError(f"topic must be a string, got {self.topic!r}.")
        one_of("wire_format", self.wire_format, KVEventsWireFormat.__args__)
        one_of("block_hash_type", self.block_hash_type, KVBlockHashType.__args__)
        at_least("data_parallel_rank", self.data_parallel_rank, 0)

    @staticmethod
    def from_json(text: str) -> "KVEventsConfig":
        """Reads the config from a JSON object.

        Raises:
            ConfigError: The text is not a JSON object, has an unknown key, or has an invalid value.
        """
        try:
            fields = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"kv_events_config is not JSON: {error}; got {text!r}.") from error
        if not isinstance(fields, dict):
            raise ConfigError(f"kv_events_config must be a JSON object, got {text!r}.")
        known = [field.name for field in dataclasses.fields(KVEventsConfig)]
        unknown = sorted(set(fields) - set(known))
        if unknown:
            raise ConfigError(
                f"kv_events_config has no {', '.join(unknown)}; it has {', '.join(known)}."
            )
        try:
            return KVEventsConfig(**fields)
        except ConfigError as error:
            raise ConfigError(f"kv_events_config: {error}") from error


def _zmq_endpoint(name: str, value: object) -> None:
    if not (isinstance(value, str) and value.startswith(("tcp://", "ipc://"))):
        raise ConfigError(
            f"{name} must be a ZeroMQ address such as tcp://127.0.0.1:5557 or ipc:///run/events, "
            f"got {value!r}."
        )
    port = value.rpartition(":")[2]
    # ZeroMQ would read port 99999 as 34463. "*" means any free port, like 0.
    is_port = port == "*" or (port.isdecimal() and int(port) <= 65535)
    if value.startswith("tcp://") and not is_port:
        raise ConfigError(f"{name} must end in a port in [0, 65535], got {value!r}.")
