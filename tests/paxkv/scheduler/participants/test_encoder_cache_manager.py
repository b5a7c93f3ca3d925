"""Encoder outputs have holders, and are evicted only when their room is needed."""

import random

import pytest

from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.engine_request import EngineRequest, MultiModalFeature
from paxkv.errors import InvariantError
from paxkv.scheduler.participants.encoder_cache_manager import EncoderCacheManager
from paxkv.scheduler.request import Request


def make_request(request_id, *items):
    """Items are (identifier, length), one after the other."""
    features, offset = [], 0
    for identifier, length in items:
        features.append(MultiModalFeature(identifier=identifier, offset=offset, length=length))
        offset += length
    return Request(
        EngineRequest(
            request_id=request_id,
            prompt_token_ids=[1] * (offset + 1),
            sampling_params=SamplingParams(),
            mm_features=tuple(features),
        ),
        max_num_tokens=100,
    )


def test_an_item_stays_cached_while_a_request_needs_it():
    cache = EncoderCacheManager(10)
    a, b = make_request("a", ("x", 6)), make_request("b", ("x", 6))
    cache.allocate(a, 0)
    cache.hold(b, [0])
    cache.free(a)
    assert cache.num_allocatable_tokens(set()) == 4
    cache.free_encoder_input(b, 0)
    assert cache.num_allocatable_tokens(set()) == 10
    assert cache.num_allocatable_tokens({"x"}) == 4
    # No request holds it, but its room is not needed either.
    assert cache.is_cached(a.mm_features[0])
    assert cache.drain_freed_identifiers() == []


def test_the_item_without_holders_for_longest_is_evicted_first():
    cache = EncoderCacheManager(10)
    request = make_request("a", ("x", 3), ("y", 3), ("z", 3), ("new", 4))
    for input_id in (0, 1, 2):
        cache.allocate(request, input_id)
    for input_id in (1, 0, 2):
        cache.free_encoder_input(request, input_id)
    cache.hold(request, [1])  # needed again
    cache.allocate(request, 3)
    # "z" stays: the room of "x" was enough.
    assert cache.drain_freed_identifiers() == ["x"]
    assert cache.drain_freed_identifiers() == []
    assert cache.num_free_tokens == 0
    cache.check_invariants({"a": request})


def test_an_item_that_occurs_twice_is_held_until_its_last_position():
    cache = EncoderCacheManager(10)
    request = make_request("a", ("x", 4), ("y", 2), ("x", 4))
    cache.allocate(request, 0)
    cache.hold(request, [0, 1, 2])
    cache.free_encoder_input(request, 0)
    assert cache.num_allocatable_tokens(set()) == 6
    cache.free_encoder_input(request, 2)
    assert cache.num_allocatable_tokens(set()) == 10


def test_allocating_a_cached_or_too_large_item_raises():
    cache = EncoderCacheManager(5)
    request = make_request("a", ("x", 3), ("y", 3))
    cache.allocate(request, 0)
    with pytest.raises(InvariantError, match="cached already"):
        cache.allocate(request, 0)
    with pytest.raises(InvariantError, match="2 of 5 encoder tokens are free"):
        cache.allocate(request, 1)
    with pytest.raises(InvariantError, match="is needed"):
        cache.withdraw("x")


def test_a_withdrawn_item_is_not_reported_as_freed():
    cache = EncoderCacheManager(5)
    request = make_request("a", ("x", 3))
    cache.allocate(request, 0)
    cache.free(request)
    cache.withdraw("x")
    assert (cache.num_free_tokens, cache.drain_freed_identifiers()) == (5, [])


def test_check_invariants_detects_wrong_counts():
    cache = EncoderCacheManager(10)
    request = make_request("a", ("x", 4))
    cache.allocate(request, 0)
    cache.check_invariants({"a": request})
    for known in ({}, {"a": make_request("a", ("y", 4))}):
        with pytest.raises(InvariantError, match="does not need"):
            cache.check_invariants(known)
    cache.num_free_tokens += 1
    with pytest.raises(InvariantError, match="4 of 10 encoder tokens are held"):
        cache.check_invariants({"a": request})


def test_invariants_hold_after_random_operations():
    draw = random.Random(0)
    cache = EncoderCacheManager(20)
    lengths = {f"i{n}": 1 + n % 6 for n in range(8)}
    requests = {}
    for number in range(3000):
        names = draw.sample(sorted(lengths), 3)
        request = make_request(f"r{number}", *((name, lengths[name]) for name in names))
        requests[request.request_id] = request
        for input_id, feature in enumerate(request.mm_features):
            if cache.is_cached(feature):
                cache.hold(request, [input_id])
            elif cache.num_allocatable_tokens(set()) >= feature.length:
                cache.allocate(request, input_id)
        if len(requests) > 3 or draw.random() < 0.4:
            gone = requests.pop(draw.choice(sorted(requests)))
            cache.free(gone)
        cache.check_invariants(requests)
    for request in requests.values():
        cache.free(request)
    assert cache.num_allocatable_tokens(set()) == 20
