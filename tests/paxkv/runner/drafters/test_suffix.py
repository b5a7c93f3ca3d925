"""`SuffixDrafter` finds what a search through all tokens finds, and its memory is bounded."""

import dataclasses
import random
from collections import Counter

import pytest

from paxkv.config.speculative_config import SuffixLimits
from paxkv.runner.drafters.suffix import MAX_INDEXED_TOKENS, SuffixDrafter, TokenIndex

LIMITS = SuffixLimits(max_depth=24, min_token_prob=0.0)


def finish(drafter, answer):
    request = drafter.start([999])
    request.extend(answer[:1])
    request.extend(answer[1:])
    drafter.end(request)


def search(texts, last_ids, max_drafts, limits):
    """The drafts by definition: the longest match in the texts; its 16 latest places vote."""
    own = texts[0]
    last_ids = last_ids[-limits.max_match :]
    found = []
    for text in texts:
        for length in range(1, len(last_ids) + 1):
            found += [
                (length, text, end)
                for end in range(length, len(text))
                if text[end - length : end] == last_ids[-length:]
            ]
    longest = max((length for length, _, _ in found), default=0)
    voters = [(text, end) for length, text, end in found if length == longest]
    num_voters = len(voters)
    max_drafts = min(max_drafts, int(limits.max_spec_factor * longest), limits.max_depth - longest)
    # Later texts are later answers, but the request itself comes first.
    voters.sort(key=lambda voter: (voter[0] is own, texts.index(voter[0]), voter[1]), reverse=True)
    drafts = []
    while len(drafts) < max_drafts:
        votes = Counter(text[end] for text, end in voters if end < len(text))
        if not votes:
            break
        ((token_id, count),) = votes.most_common(1)
        if count / num_voters < limits.min_token_prob:
            break
        drafts.append(token_id)
        voters = [(t, end + 1) for t, end in voters if t[end : end + 1] == [token_id]]
    return drafts


def test_longest_match_is_in_a_finished_answer():
    drafter = SuffixDrafter(LIMITS)
    finish(drafter, [5, 1, 2, 3, 4, 6, 7, 8, 9])
    request = drafter.start([3, 4, 50, 1, 2, 3, 4])
    # Of its own tokens only [3, 4] match. The match of 4 tokens allows 4 drafts.
    assert request.propose(10) == [6, 7, 8, 9]
    request.extend([50])
    assert request.propose(10) == [1, 2, 3]


def test_own_answer_counts_only_when_it_is_finished():
    drafter = SuffixDrafter(LIMITS)
    first = drafter.start([1, 2])
    first.extend([3, 4, 5])
    second = drafter.start([9, 3])
    assert second.propose(4) == []
    drafter.end(first)
    assert second.propose(4) == [4]
    # Prompts are not kept.
    assert drafter.start([9, 1]).propose(4) == []


def test_drafts_end_with_the_answer():
    drafter = SuffixDrafter(LIMITS)
    finish(drafter, [1, 2, 3, 4])
    finish(drafter, [5, 6, 7, 8])
    assert drafter.start([1, 2, 3]).propose(4) == [4]
    assert drafter.start([1, 2, 3, 4]).propose(4) == []


def test_most_frequent_token_follows_until_it_is_too_rare():
    drafter = SuffixDrafter(dataclasses.replace(LIMITS, min_token_prob=0.5))
    for answer in (
        [1, 2, 3, 4, 10, 11],
        [1, 2, 3, 4, 10, 12],
        [1, 2, 3, 4, 10, 13],
        [1, 2, 3, 4, 20],
    ):
        finish(drafter, answer)
    assert drafter.start([1, 2, 3, 4]).propose(4) == [10]


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_longer_matches_allow_more_drafts(factor):
    limits = dataclasses.replace(LIMITS, max_spec_factor=factor)
    drafter = SuffixDrafter(limits)
    finish(drafter, [*range(100, 150)])
    for length in range(1, 40):
        drafts = drafter.start([*range(100, 100 + length)]).propose(64)
        match = min(length, limits.max_match)
        assert len(drafts) == min(int(factor * match), 24 - match, 50 - length)
        assert drafts == [*range(100 + length, 100 + length + len(drafts))]


@pytest.mark.parametrize("seed", range(20))
def test_drafts_equal_a_search_after_every_step(seed):
    rng = random.Random(seed)
    limits = SuffixLimits(
        max_depth=rng.choice([6, 24]),
        max_spec_factor=rng.choice([0.5, 1.0, 3.0]),
        min_token_prob=rng.choice([0.0, 0.4]),
    )
    drafter, num_words = SuffixDrafter(limits), rng.choice((20, 40))
    answers = [rng.choices(range(num_words), k=rng.randint(1, 20)) for _ in range(4)]
    for answer in answers:
        finish(drafter, answer)
    token_ids = rng.choices(range(num_words), k=rng.randint(1, 20))
    request = drafter.start(token_ids)
    for _ in range(20):
        max_drafts = rng.randint(1, 8)
        wanted = search([token_ids, *answers], token_ids, max_drafts, limits)
        assert request.propose(max_drafts) == wanted
        new_ids = rng.choices(range(num_words), k=rng.randint(1, 3))
        # Copies, so that there are long matches.
        source = rng.choice([token_ids, *answers])
        new_ids += source[rng.randrange(len(source)) :][: rng.randint(0, 6)]
        request.extend(new_ids)
        token_ids = token_ids + new_ids


@pytest.mark.parametrize("max_requests", [3, 10_000])
def test_memory_of_finished_answers_is_bounded(max_requests):
    limits = dataclasses.replace(LIMITS, max_cached_requests=max_requests)
    drafter, rng = SuffixDrafter(limits, max_cached_tokens=100), random.Random(0)
    answers = []
    for _ in range(200):
        answers.append([rng.randrange(1000) for _ in range(rng.choice([1, 10, 30, 150]))])
        finish(drafter, answers[-1])
        drafter.start([answers[-1][0]]).propose(4)
        index = drafter._finished.index
        assert len(index) <= 100 and len(drafter._finished._lengths) <= max_requests
        num_places = sum(len(p) for places in index._places.values() for p in places.values())
        assert num_places <= 2 * len(index)
    # The last one was kept, as far as it fits.
    last = answers[-1][-99:]
    if len(last) > 1:
        assert drafter.start(last[:1]).propose(1) == last[1:2]


def test_no_answer_is_kept_if_none_may_be():
    drafter = SuffixDrafter(dataclasses.replace(LIMITS, max_cached_requests=0))
    finish(drafter, [1, 2, 3])
    assert drafter.start([1, 2]).propose(4) == []


def test_frequent_tokens_have_few_places():
    index = TokenIndex()
    index.extend([7] * 1000)
    length, places = index.find([7] * 12)
    assert length == 12 and places == [*range(999, 984, -1)]


def test_long_prompt_is_indexed_over_several_lookups():
    index = TokenIndex()
    index.extend([*range(3 * MAX_INDEXED_TOKENS), -1])
    late = MAX_INDEXED_TOKENS + 100
    last_ids = [*range(late - 8, late)]
    assert index.find(last_ids) == (0, [])
    assert index.find(last_ids) == (8, [late])
    # Tokens that were never looked up are dropped without a trace.
    index.extend([*range(50, 60), -1])
    index.drop_first(3 * MAX_INDEXED_TOKENS + 1)
    assert index.find([52, 53, 54, 55]) == (4, [3 * MAX_INDEXED_TOKENS + 7])
    assert index.find(last_ids) == (0, [])
