"""Workloads are seeded and are what their names promise."""

import pytest

from benchmarks.workloads import WORKLOADS, Workload, make_workload

VOCAB_SIZE = 1000


def lengths(workload: Workload) -> tuple[list[int], list[int]]:
    """Sorted lengths of prompts, and of outputs."""
    return (
        sorted(len(request.prompt_token_ids) for request in workload.requests),
        sorted(request.num_output_tokens for request in workload.requests),
    )


@pytest.mark.parametrize("name", WORKLOADS)
def test_seed_decides_the_requests(name: str) -> None:
    workload = make_workload(name, vocab_size=VOCAB_SIZE, seed=3)
    assert workload == make_workload(name, vocab_size=VOCAB_SIZE, seed=3)
    assert workload != make_workload(name, vocab_size=VOCAB_SIZE, seed=4)
    tokens = [t for request in workload.requests for t in request.prompt_token_ids]
    assert (min(tokens), max(tokens)) == (0, VOCAB_SIZE - 1)


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
def test_lengths_fill_the_promised_ranges(name, num_requests, prompts, outputs) -> None:
    workload = make_workload(name, vocab_size=VOCAB_SIZE)
    assert len(workload.requests) == num_requests
    for (low, high), found in zip((prompts, outputs), lengths(workload), strict=True):
        assert low <= found[0] and found[-1] <= high
        # Drawn over all of the range, not only inside it.
        assert found[0] - low <= (high - low) / 8 and high - found[-1] <= (high - low) / 8


def test_prefix_is_512_shared_tokens_then_32_of_its_own() -> None:
    prompts = [r.prompt_token_ids for r in make_workload("prefix", vocab_size=1000).requests]
    assert len({tuple(prompt[:512]) for prompt in prompts}) == 1
    # Two that began alike would share more.
    assert len({prompt[512] for prompt in prompts}) > 48
    assert len({tuple(prompt[512:]) for prompt in prompts}) == 64


def test_smaller_workload_is_the_beginning_with_cut_outputs() -> None:
    workload = make_workload("mixed", vocab_size=1000)
    first = workload.first(5, max_output_tokens=40)
    assert len(first.requests) == 5
    for request, whole in zip(first.requests, workload.requests, strict=False):
        assert request.prompt_token_ids == whole.prompt_token_ids
        assert request.num_output_tokens == min(40, whole.num_output_tokens)
    assert first.num_output_tokens < workload.first(5).num_output_tokens
