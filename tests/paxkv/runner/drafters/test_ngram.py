"""`NgramDrafter` finds what a search through all tokens finds, in constant time."""

import random
import time

import pytest

from paxkv.runner.drafters.ngram import NgramDrafter


def search(token_ids, *, shortest, longest, max_drafts):
    """The drafts by definition: after the first of the longest matches."""
    for length in range(min(longest, len(token_ids) - 1), shortest - 1, -1):
        suffix = token_ids[-length:]
        for end in range(length, len(token_ids)):
            if token_ids[end - length : end] == suffix:
                return token_ids[end : end + max_drafts]
    return []


@pytest.mark.parametrize(
    ("token_ids", "shortest", "longest", "max_drafts", "drafts"),
    [
        ([7, 8, 9, 5, 7, 8], 2, 2, 4, [9, 5, 7, 8]),
        ([7, 8, 9, 5, 7, 8], 2, 2, 1, [9]),
        ([7, 8, 9, 5, 7, 8], 3, 3, 4, []),
        # The longest match wins, and among equally long ones the first.
        ([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 1, 3, 1, [9]),
        ([9, 2, 3, 8, 1, 2, 3, 7, 1, 2, 3], 2, 3, 2, [7, 1]),
        # A match may overlap the end.
        ([4, 4, 4], 2, 2, 4, [4]),
        ([4], 1, 3, 4, []),
    ],
)
def test_drafts_follow_the_match(token_ids, shortest, longest, max_drafts, drafts):
    request = NgramDrafter(shortest=shortest, longest=longest).start(token_ids)
    assert request.propose(max_drafts) == drafts


@pytest.mark.parametrize("seed", range(20))
def test_drafts_equal_a_search_after_every_step(seed):
    rng = random.Random(seed)
    shortest = rng.randint(1, 3)
    limits = {"shortest": shortest, "longest": shortest + rng.randint(0, 3)}
    num_words = rng.choice((2, 4, 10))
    token_ids = rng.choices(range(num_words), k=rng.randint(1, 40))
    request = NgramDrafter(**limits).start(token_ids)
    for _ in range(40):
        max_drafts = rng.randint(1, 5)
        wanted = search(token_ids, max_drafts=max_drafts, **limits)
        assert request.propose(max_drafts) == wanted
        new_ids = rng.choices(range(num_words), k=rng.randint(1, 4))
        request.extend(new_ids)
        token_ids = token_ids + new_ids


def test_step_of_a_long_request_takes_no_longer_than_that_of_a_short_one():
    def seconds_per_step(num_tokens):
        rng = random.Random(0)
        request = NgramDrafter(shortest=2, longest=4).start(rng.choices(range(50), k=num_tokens))
        request.propose(4)
        times = []
        for _ in range(300):
            start = time.perf_counter()
            request.extend([rng.randrange(50)])
            request.propose(4)
            times.append(time.perf_counter() - start)
        return sorted(times)[len(times) // 2]

    # A search would take a thousand times longer.
    assert seconds_per_step(100_000) < 20 * seconds_per_step(100)
