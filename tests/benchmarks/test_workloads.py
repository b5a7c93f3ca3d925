"""Workloads are seeded and have the documented lengths."""

import pytest

from benchmarks.workloads import make_workload


@pytest.mark.parametrize(
    ("name", "num_requests", "prompts", "outputs", "num_shared"),
    [
        ("mixed", 64, (32, 256), (32, 128), 0),
        ("prefix", 64, (544, 544), (16, 16), 512),
        ("prefix-no-hits", 64, (544, 544), (16, 16), 0),
        ("skewed", 64, (32, 128), (8, 256), 0),
        ("uniform-256", 256, (100, 1024), (100, 1024), 0),
    ],
)
def test_requests_follow_from_the_seed_and_fill_their_ranges(
    name, num_requests, prompts, outputs, num_shared
) -> None:
    workload = make_workload(name, vocab_size=1000, seed=3)
    assert workload == make_workload(name, vocab_size=1000, seed=3)
    assert workload != make_workload(name, vocab_size=1000, seed=4)
    found = [request.prompt_token_ids for request in workload.requests]
    assert {min(map(min, found)), max(map(max, found))} == {0, 999}
    assert len({tuple(tokens[:num_shared]) for tokens in found}) == 1
    # Prompts share no more than that.
    assert len({tokens[num_shared] for tokens in found}) > 48
    lengths = [request.num_output_tokens for request in workload.requests]
    assert len(found) == num_requests
    for (low, high), of_all in ((prompts, [*map(len, found)]), (outputs, lengths)):
        # Drawn over all of the range, not only inside it.
        assert low <= min(of_all) <= low + (high - low) / 8
        assert high - (high - low) / 8 <= max(of_all) <= high
