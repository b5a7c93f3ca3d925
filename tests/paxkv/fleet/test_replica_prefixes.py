"""The estimate of a replica's prefix cache: the prompts sent last, in chunks."""

import dataclasses
import os
import time

from hypothesis import given
from hypothesis import strategies as st

from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.engine_request import EngineRequest, MultiModalFeature
from paxkv.fleet.replica_prefixes import ReplicaPrefixes, prompt_chain

CHUNK = 16


def request(token_ids: list[int], **settings: object) -> EngineRequest:
    settings = {"sampling_params": SamplingParams()} | settings
    return EngineRequest(request_id="r", prompt_token_ids=token_ids, **settings)


def prompts() -> st.SearchStrategy[list[int]]:
    """Prompts of any length from few different chunks, so that many have a common prefix."""
    chunks = st.lists(st.integers(0, 2), max_size=5)
    whole = chunks.map(lambda kinds: [token for kind in kinds for token in [kind] * CHUNK])
    return st.builds(lambda begin, rest: begin + [7] * rest, whole, st.integers(1, CHUNK - 1))


def num_common_chunks(a: list[int], b: list[int]) -> int:
    return len(os.path.commonprefix([a, b])) // CHUNK


@given(sent=st.lists(prompts(), max_size=8), wanted=prompts())
def test_number_of_known_chunks_is_the_longest_common_prefix(
    sent: list[list[int]], wanted: list[int]
) -> None:
    prefixes = ReplicaPrefixes(max_tokens=10_000)
    for token_ids in sent:
        prefixes.record(prompt_chain(request(token_ids)))
    longest = max((num_common_chunks(wanted, token_ids) for token_ids in sent), default=0)
    assert prefixes.num_known(prompt_chain(request(wanted))) == longest
    prefixes.clear()
    assert prefixes.num_known(prompt_chain(request(wanted))) == 0


def test_least_recent_prompts_are_forgotten_first_from_their_end() -> None:
    first, second, third = (
        prompt_chain(request([token] * CHUNK * num)) for token, num in ((1, 4), (2, 3), (3, 2))
    )
    prefixes = ReplicaPrefixes(max_tokens=6 * CHUNK)
    prefixes.record(first)
    prefixes.record(second)
    assert [prefixes.num_known(chain) for chain in (first, second)] == [3, 3]
    prefixes.record(first)
    assert [prefixes.num_known(chain) for chain in (first, second)] == [4, 2]
    prefixes.record(third)
    assert [prefixes.num_known(chain) for chain in (first, second, third)] == [4, 0, 2]


def test_requests_that_cannot_share_blocks_have_different_hashes() -> None:
    token_ids = [5] * CHUNK * 2
    image = MultiModalFeature(identifier="cat", offset=0, length=4)
    requests = [
        request(token_ids),
        request(token_ids, cache_salt="tenant"),
        request(token_ids, lora_name="tenant"),
        request(token_ids, mm_features=(image,)),
        request(token_ids, mm_features=(dataclasses.replace(image, identifier="dog"),)),
    ]
    chains = [prompt_chain(request) for request in requests]
    assert len({chunk for chain in chains for chunk in chain}) == 2 * len(requests)


def test_forgetting_chunks_takes_little_longer_than_recording_them() -> None:
    num_chunks = 40_000
    prefixes = ReplicaPrefixes(max_tokens=num_chunks * CHUNK)

    def seconds_to_record(first: int) -> float:
        start_s = time.perf_counter()
        prefixes.record(range(first, first + num_chunks))
        return time.perf_counter() - start_s

    without = max(seconds_to_record(0) for _ in range(2))
    # Each call removes all old chunks one by one. The minimum ignores a busy machine.
    assert min(seconds_to_record(n * num_chunks) for n in range(1, 4)) < 20 * without
