"""Numbers of hosts and devices that do not fit together are refused."""

import pytest

from paxkv.config.parallel_config import ParallelConfig
from paxkv.errors import ConfigError


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
