"""The number of engines, and of devices of each, with their help texts."""

import dataclasses

from paxkv.config.setting import at_least, setting
from paxkv.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """The number of engines, and of devices of each."""

    tensor_parallel_size: int = setting(
        "number of devices of an engine. Each has a part of every layer and of the KV cache, so "
        "larger models and more requests fit: docs/guide/several-devices.md",
        1,
        aliases=("-tp",),
    )
    enable_expert_parallel: bool = setting(
        "give each device its own experts, instead of a part of each expert. The number of experts "
        "must be a multiple of --tensor-parallel-size",
        False,
        aliases=("-ep",),
    )
    decode_context_parallel_size: int = setting(
        "number of neighboring devices that share the positions of each request. Otherwise each "
        "would have a copy of all positions, with latents or with fewer KV heads than devices. It "
        "must divide --tensor-parallel-size: docs/guide/several-devices.md",
        1,
        aliases=("-dcp",),
    )
    data_parallel_size: int = setting(
        "number of engines that share the requests. Each is a process with its own weights and KV "
        "cache, so other limits and sizes apply to each engine. On an NVIDIA machine each engine "
        "has --tensor-parallel-size GPUs; without GPUs, an equal part of the processor cores",
        1,
        aliases=("-dp",),
    )

    nnodes: int = setting(
        "number of hosts of an engine, which share its --tensor-parallel-size devices equally. Run "
        "the command with the same flags on each host: docs/guide/several-devices.md",
        1,
        aliases=("-n",),
    )
    node_rank: int = setting(
        "number of this host. Host 0 serves requests; the others compute with it",
        0,
        aliases=("-r",),
    )
    master_addr: str = setting(
        "address of host 0 in the network of the hosts. The network must be private, because the "
        "hosts send tokens unencrypted",
        "127.0.0.1",
    )
    master_port: int = setting(
        "port of host 0 for the other hosts. Each start uses two more free ports of host 0", 29501
    )
    distributed_timeout_seconds: int = setting(
        "longest time that the hosts of an engine wait for each other while they start", 600
    )

    def __post_init__(self) -> None:
        at_least("tensor_parallel_size", self.tensor_parallel_size, 1)
        at_least("decode_context_parallel_size", self.decode_context_parallel_size, 1)
        if self.tensor_parallel_size % self.decode_context_parallel_size:
            raise ConfigError(
                f"decode_context_parallel_size={self.decode_context_parallel_size} must divide "
                f"tensor_parallel_size={self.tensor_parallel_size}: the devices form groups of "
                "this size."
            )
        if self.nnodes > 1 and self.decode_context_parallel_size > 1:
            raise ConfigError(
                f"decode_context_parallel_size={self.decode_context_parallel_size} does not work "
                f"with nnodes={self.nnodes} yet. Leave it out."
            )
        at_least("data_parallel_size", self.data_parallel_size, 1)
        at_least("nnodes", self.nnodes, 1)
        at_least("node_rank", self.node_rank, 0)
        at_least("master_port", self.master_port, 1)
        if self.master_port > 65535:
            raise ConfigError(f"master_port must be at most 65535, got {self.master_port}.")
        at_least("distributed_timeout_seconds", self.distributed_timeout_seconds, 1)
        if self.node_rank >= self.nnodes:
            raise ConfigError(
                f"node_rank must be below nnodes={self.nnodes}, got {self.node_rank}. Hosts are "
                "numbered from 0."
            )
        if self.tensor_parallel_size % self.nnodes:
            raise ConfigError(
                f"tensor_parallel_size={self.tensor_parallel_size} is not a multiple of "
                f"nnodes={self.nnodes}. Each host has the same number of devices."
            )
        if self.nnodes > 1 and self.data_parallel_size > 1:
            raise ConfigError(
                f"data_parallel_size={self.data_parallel_size} does not work with "
                f"nnodes={self.nnodes} yet. Start a server for each engine."
            )
