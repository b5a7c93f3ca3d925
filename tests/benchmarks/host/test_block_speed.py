"""The rates are of what they say: every block is handed out, and cached where that is measured."""

import pytest

from benchmarks.host import block_speed


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash"])
def test_hash_rate_is_positive_for_each_algorithm(algorithm: str) -> None:
    assert block_speed.measure_hash(algorithm, num_prompts=1) > 0


def test_pool_rates_are_positive() -> None:
    assert block_speed.measure_pool(num_runs=2) > 0
    # More runs than the pool holds: blocks are forgotten and cached anew.
    assert block_speed.measure_cached_pool(num_runs=40) > 0
