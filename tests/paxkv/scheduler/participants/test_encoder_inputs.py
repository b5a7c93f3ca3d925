"""The items that a chunk needs, and the cut of a chunk if an item cannot be encoded."""

import pytest

from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.engine_request import EngineRequest, MultiModalFeature
from paxkv.scheduler.participants.encoder_inputs import EncoderInputs
from paxkv.scheduler.request import Request


def make_request(request_id, *items, num_tokens=40):
    """Items are (identifier, offset, length)."""
    return Request(
        EngineRequest(
            request_id=request_id,
            prompt_token_ids=[1] * num_tokens,
            sampling_params=SamplingParams(),
            mm_features=tuple(
                MultiModalFeature(identifier=identifier, offset=offset, length=length)
                for identifier, offset, length in items
            ),
        ),
        max_num_tokens=100,
    )


def make_inputs(budget=10, cache_size=10, *, is_encoder_decoder=False):
    inputs = EncoderInputs(
        max_num_encoder_input_tokens=budget,
        cache_size=cache_size,
        is_encoder_decoder=is_encoder_decoder,
    )
    inputs.start_step()
    return inputs


def fit(inputs, request, num_computed_tokens, num_new_tokens):
    demand = inputs.fit(request, num_computed_tokens, num_new_tokens)
    return demand.num_new_tokens, demand.input_ids


@pytest.mark.parametrize(
    ("chunk", "expected"),
    [
        ((0, 4), (4, [])),
        ((0, 5), (5, [0])),  # its first position suffices: an item is encoded as a whole
        ((8, 4), (4, [0])),
        ((9, 5), (5, [])),
        ((9, 6), (6, [1])),
        ((0, 20), (20, [0, 1])),
        ((30, 5), (5, [])),
    ],
)
def test_items_that_overlap_the_chunk_are_needed(chunk, expected):
    request = make_request("a", ("x", 4, 5), ("y", 14, 5))
    assert fit(make_inputs(), request, *chunk) == expected


def test_a_chunk_ends_before_an_item_that_exceeds_budget_or_cache():
    request = make_request("a", ("x", 4, 5), ("y", 14, 5))
    assert fit(make_inputs(budget=9), request, 0, 20) == (14, [0])
    assert fit(make_inputs(cache_size=9), request, 0, 20) == (14, [0])
    assert fit(make_inputs(budget=4), request, 0, 20) == (4, [])
    # A prefix hit may end inside an item: then nothing can be computed yet.
    assert fit(make_inputs(budget=4), request, 6, 20) == (0, [])


def test_fit_allocates_nothing_and_commit_allocates():
    inputs = make_inputs(budget=6)
    a = make_request("a", ("x", 0, 4))
    b = make_request("b", ("x", 0, 4), ("y", 4, 2), ("z", 6, 2))
    for _ in range(3):
        demand = inputs.fit(a, 0, 8)
    inputs.commit(a, demand)
    # "x" is encoded in this step already, for both; "y" needs the rest of the budget.
    assert fit(inputs, b, 0, 8) == (6, [0, 1])
    assert inputs.drain_scheduled() == {"a": [0]}
    inputs.start_step()
    assert fit(inputs, b, 0, 8) == (8, [0, 1, 2])
    assert inputs.drain_scheduled() == {}
    inputs.commit(b, inputs.fit(b, 0, 8))
    assert inputs.drain_scheduled() == {"b": [1, 2]}


def test_fit_does_not_evict_a_later_item_of_the_same_chunk():
    inputs = make_inputs(cache_size=6)
    first = make_request("a", ("old", 0, 4))
    inputs.commit(first, inputs.fit(first, 0, 4))
    first.num_computed_tokens = 4
    inputs.end_step()
    inputs.start_step()
    # "new" needs 3 tokens and 2 are free; "old" is evictable, but needed in the same chunk.
    second = make_request("b", ("new", 0, 3), ("old", 3, 4))
    assert fit(inputs, second, 0, 10) == (3, [0])
    third = make_request("c", ("new", 0, 2), ("old", 2, 4))
    demand = inputs.fit(third, 0, 10)
    assert demand.num_new_tokens == 10
    inputs.commit(third, demand)
    inputs.cache_manager.check_invariants({"c": third})


def test_commit_does_not_evict_items_that_the_chunk_needs():
    inputs = make_inputs(cache_size=8)
    first = make_request("a", ("old", 0, 4), ("other", 4, 2))
    inputs.commit(first, inputs.fit(first, 0, 6))
    first.num_computed_tokens = 6
    inputs.end_step()
    inputs.drain_scheduled()
    inputs.start_step()
    # "new" needs 3 tokens and 2 are free. "old" would be evicted first.
    second = make_request("b", ("new", 0, 3), ("old", 3, 4))
    inputs.commit(second, inputs.fit(second, 0, 7))
    assert inputs.drain_scheduled() == {"b": [0]}
    assert inputs.cache_manager.drain_freed_identifiers() == ["other"]


def test_an_item_twice_in_a_chunk_is_encoded_once_and_held_twice():
    inputs = make_inputs()
    request = make_request("a", ("x", 0, 4), ("x", 10, 4))
    demand = inputs.fit(request, 0, 20)
    assert demand.input_ids == [0, 1]
    inputs.commit(request, demand)
    assert inputs.drain_scheduled() == {"a": [0]}
    request.num_computed_tokens = 13
    inputs.end_step()
    assert inputs.cache_manager.holders("x") == [("a", 1)]
    request.num_computed_tokens = 14
    inputs.end_step()
    assert inputs.cache_manager.holders("x") == []


def test_items_of_a_preempted_request_pass_to_a_holder_or_are_cancelled():
    inputs = make_inputs(budget=6)
    victim = make_request("a", ("x", 0, 4), ("y", 4, 2))
    other = make_request("b", ("x", 3, 4))
    for request in (victim, other):
        inputs.commit(request, inputs.fit(request, 0, 20))
    inputs.release_preempted(victim)
    assert inputs.cache_manager.holders("x") == [("b", 0)]
    assert not inputs.cache_manager.is_cached(victim.mm_features[1])
    assert inputs.cache_manager.drain_freed_identifiers() == []
    # The 2 tokens of "y" are in the budget again, but not the tokens of "x".
    third = make_request("c", ("z", 0, 2), ("w", 2, 1))
    assert fit(inputs, third, 0, 20) == (2, [0])
    inputs.release_preempted(other)
    assert fit(inputs, third, 0, 20) == (20, [0, 1])
    assert inputs.drain_scheduled() == {}


def test_commit_encodes_an_item_whose_encoding_was_cancelled_after_fit():
    inputs = make_inputs(budget=4)
    victim, other = make_request("a", ("x", 0, 4)), make_request("b", ("x", 0, 4))
    inputs.commit(victim, inputs.fit(victim, 0, 5))
    demand = inputs.fit(other, 0, 5)
    inputs.release_preempted(victim)
    inputs.commit(other, demand)
    assert inputs.drain_scheduled() == {"b": [0]}
    assert inputs.cache_manager.holders("x") == [("b", 0)]


def test_items_of_a_step_in_flight_are_not_cancelled():
    inputs = make_inputs()
    request = make_request("a", ("x", 0, 4))
    inputs.commit(request, inputs.fit(request, 0, 5))
    scheduled = inputs.drain_scheduled()
    inputs.release_preempted(request)
    # The runner has the item, so it is reported as freed when its room is needed.
    assert scheduled == {"a": [0]}
    assert inputs.cache_manager.is_cached(request.mm_features[0])
    assert inputs.cache_manager.holders("x") == []


def test_an_encoder_decoder_encodes_all_items_before_the_first_token():
    inputs = make_inputs(is_encoder_decoder=True)
    request = make_request("a", ("x", 0, 4), ("y", 4, 5), num_tokens=3)
    demand = inputs.fit(request, 0, 1)
    assert (demand.num_new_tokens, demand.input_ids) == (1, [0, 1])
    inputs.commit(request, demand)
    request.num_computed_tokens = 1
    inputs.end_step()
    assert inputs.cache_manager.num_allocatable_tokens(set()) == 10
    assert fit(inputs, request, 1, 2) == (2, [])
    assert fit(make_inputs(budget=8, is_encoder_decoder=True), request, 0, 2) == (0, [0])
