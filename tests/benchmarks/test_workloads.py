"""Workloads are seeded and have the documented lengths."""

import pytest

from benchmarks.workloads import make_workload


@pytest.mark.parametrize(
    ("name", "num_requests", "prompts", "outputs"),
    [
        ("mixed", 64, (32, 256), (32, 128)),
        ("prefix", 64, (544, 544), (16, 16)),
        ("prefix-no-hits", 64, (544, 544), (16, 16)),
        ("skewed", 64, (32, 128), (8, 256)),
        ("uniform-256", 256, (100, 1024), (100, 1024)),
    ],
)
def test_seed_decides_requests_and_lengths_fill_their_ranges(
    name, num_requests, prompts, outputs
) -> None:
    workload = make_workload(name, vocab_size=1000, seed=3)
    assert workload == make_workload(name, vocab_size=1000, seed=3)
    assert workload != make_workload(name, vocab_size=1000, seed=4)
    tokens = [token for request in workload.requests for token in request.prompt_token_ids]
    assert (min(tokens), max(tokens)) == (0, 999)
    assert len(workload.requests) == num_requests
    lengths_in = [len(request.prompt_token_ids) for request in workload.requests]
    lengths_out = [request.num_output_tokens for request in workload.requests]
    for (low, high), found in ((prompts, lengths_in), (outputs, lengths_out)):
        # Drawn over all of the range, not only inside it.
        assert low <= min(found) <= low + (high - low) / 8
        assert high - (high - low) / 8 <= max(found) <= high


def test_prefix_is_512_shared_tokens_then_32_of_its_own() -> None:
    prompts = [r.prompt_token_ids for r in make_workload("prefix", vocab_size=1000).requests]
    assert len({tuple(prompt[:512]) for prompt in prompts}) == 1
    # Otherwise prompts would share more than the prefix.
    assert len({prompt[512] for prompt in prompts}) > 48
    assert len({tuple(prompt[512:]) for prompt in prompts}) == 64
