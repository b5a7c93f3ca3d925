"""Which replica computes a prompt: the load, stalls, and prompts that were sent before."""

import os
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.engine_output import UtilityReply
from paxkv.contracts.engine_request import AbortRequests
from paxkv.errors import EngineDeadError
from paxkv.fleet.prefix_router import PrefixRouter
from paxkv.fleet.prompt_digest import prompt_chain
from tests.paxkv.client.fake_replicas import Replicas, request

CHUNK = 16


def test_stalled_replica_gets_no_requests_while_another_makes_progress() -> None:
    replicas = Replicas(3)
    first, second, third = replicas.engines
    assert replicas.add("a") == 0
    first.stall = "no step"
    # The first replica has fewer requests than the others, but it is stalled.
    assert [replicas.add(name) for name in "bcdef"] == [1, 2, 1, 2, 1]
    assert replicas.transport.stall is None
    replicas.die(1)
    assert replicas.transport.stall is None
    third.stall = "no step either"
    assert replicas.transport.stall == "replica 0: no step replica 2: no step either"
    # All living replicas are stalled, so requests are routed as usual.
    assert replicas.add("g") == 0
    replicas.restart(1, 5.0)
    assert replicas.transport.stall is None
    assert replicas.add("h") == 1
    second.stall = third.stall = first.stall = None
    replicas.die(0), replicas.die(1), replicas.die(2)
    # Dead replicas are not stalled.
    assert replicas.transport.stall is None


def test_prompt_goes_to_the_replica_with_its_prefix_unless_that_is_busier() -> None:
    replicas = Replicas(2)
    first, second = ([token] * 64 for token in (1, 2))
    assert replicas.add("a", prompt_token_ids=first) == 0
    assert replicas.add("b", prompt_token_ids=second) == 1
    assert replicas.add("c", prompt_token_ids=second) == 1
    # Replica 1 has the prefix of this longer prompt, although replica 0 has fewer requests.
    assert replicas.add("d", prompt_token_ids=second + [3] * 64) == 1
    assert [replicas.add(name, prompt_token_ids=second) for name in "ef"] == [0, 0]
    # Both replicas have the prefix now, but only replica 1 has the longer prompt.
    assert replicas.add("g", prompt_token_ids=second + [3] * 64) == 1
    assert replicas.add("h", prompt_token_ids=second) == 0
    more = [replicas.add(name, prompt_token_ids=second + [3] * 64) for name in "ijkl"]
    assert more == [1, 1, 1, 0]


def test_idle_replica_gets_a_prompt_whose_prefix_another_replica_has() -> None:
    replicas = Replicas()
    chat = [[9] * 64 + [token] * 16 for token in range(4)]
    # All prompts have the same prefix, but the first three go to idle replicas.
    assert [replicas.add(str(idx), prompt_token_ids=chat[idx]) for idx in range(3)] == [0, 1, 2]
    replicas.transport.send(AbortRequests(request_ids=["2"]))
    assert replicas.add("again", prompt_token_ids=chat[1]) == 2


@pytest.mark.parametrize("is_reset", [True, False])
def test_only_a_successful_cache_reset_clears_the_known_prefixes(is_reset: bool) -> None:
    replicas = Replicas(2)
    replicas.add("a")
    assert replicas.add("b", prompt_token_ids=[5] * 64) == 1
    answer = UtilityReply(call_id=3, result_json="true" if is_reset else "false")
    replicas.call("reset_prefix_cache", [answer] * 2)
    assert replicas.add("c", prompt_token_ids=[5] * 64) == (0 if is_reset else 1)


@pytest.mark.parametrize("what", ["death", "no cache"])
def test_without_a_cached_prefix_the_first_least_busy_replica_is_chosen(what: str) -> None:
    replicas = Replicas(2, have_prefix_caches=what != "no cache")
    replicas.add("a")
    assert replicas.add("b", prompt_token_ids=[5] * 64) == 1
    if what == "death":
        replicas.die(1)
        replicas.restart(1, 1.0)
    replicas.transport.send(AbortRequests(request_ids=["a", "b"]))
    assert replicas.add("c", prompt_token_ids=[5] * 64) == 0


def test_prompt_that_reads_no_cache_is_routed_by_load_and_then_known() -> None:
    replicas = Replicas(2)
    replicas.add("a")
    prompt = {"prompt_token_ids": [5] * 64}
    unread = prompt | {"sampling_params": SamplingParams(prompt_logprobs=0)}
    assert [replicas.add("b", **unread), replicas.add("c", **prompt)] == [1, 1]
    assert replicas.add("d", **unread) == 0


def test_replica_with_the_prefix_may_be_busier_by_a_share_of_the_load() -> None:
    replicas = Replicas(2)
    for number in range(40):
        replicas.add(str(number))
    places = [replicas.add(f"known{n}", prompt_token_ids=[5] * 64) for n in range(7)]
    # With 20 requests each, the limit is 20 + 20 // 4 = 25: requests 21 to 26 go to replica 0.
    assert places == [0] * 6 + [1]


def test_there_is_no_choice_without_a_reachable_replica() -> None:
    replicas = Replicas(2)
    # A send fails before the replica's `EngineDead` arrives.
    replicas.engines[0].is_dead = True
    assert replicas.add("a") == 1
    replicas.die(1)
    with pytest.raises(EngineDeadError, match="all engines have ended"):
        replicas.add("b")
    # The client may ask again while the unreachable replica has not reported its end.
    with pytest.raises(EngineDeadError, match="all engines have ended"):
        replicas.add("c")


def prompts() -> st.SearchStrategy[list[int]]:
    """Prompts of any length from few different chunks, so that many have a common prefix."""
    chunks = st.lists(st.integers(0, 2), max_size=5)
    whole = chunks.map(lambda kinds: [token for kind in kinds for token in [kind] * CHUNK])
    return st.builds(lambda begin, rest: begin + [7] * rest, whole, st.integers(1, CHUNK - 1))


def chain_of(token_ids: list[int]) -> list[int]:
    return prompt_chain(request("r", prompt_token_ids=token_ids))


def router_of_one(max_tokens: int) -> PrefixRouter[str]:
    router = PrefixRouter[str]()
    router.add("only", max_tokens)
    return router


@given(sent=st.lists(prompts(), max_size=8), wanted=prompts())
def test_number_of_known_chunks_is_the_longest_common_prefix(
    sent: list[list[int]], wanted: list[int]
) -> None:
    router = router_of_one(10_000)
    for token_ids in sent:
        router.record("only", chain_of(token_ids))
    longest = max((len(os.path.commonprefix([wanted, t])) // CHUNK for t in sent), default=0)
    assert router.num_known("only", chain_of(wanted)) == longest
    router.forget_prompts("only")
    assert router.num_known("only", chain_of(wanted)) == 0


def test_least_recent_prompts_are_forgotten_first_from_their_end() -> None:
    first, second, third = (
        chain_of([token] * CHUNK * num) for token, num in ((1, 4), (2, 3), (3, 2))
    )
    router = router_of_one(6 * CHUNK)

    def known() -> list[int]:
        return [router.num_known("only", chain) for chain in (first, second, third)]

    router.record("only", first)
    router.record("only", second)
    assert known() == [3, 3, 0]
    router.record("only", first)
    assert known() == [4, 2, 0]
    router.record("only", third)
    assert known() == [4, 0, 2]


def test_forgetting_chunks_takes_little_longer_than_recording_them() -> None:
    num_chunks = 40_000
    router = router_of_one(num_chunks * CHUNK)

    def seconds_to_record(first: int) -> float:
        start_s = time.perf_counter()
        router.record("only", range(first, first + num_chunks))
        return time.perf_counter() - start_s

    without = max(seconds_to_record(0) for _ in range(2))
    # Each call removes all old chunks one by one. The minimum ignores a busy machine.
    assert min(seconds_to_record(n * num_chunks) for n in range(1, 4)) < 20 * without


def slow_choice(
    router: PrefixRouter[str], loads: dict[str, int], avoid: set[str], chain: list[int]
) -> set[str]:
    """All replicas that the rule in `PrefixRouter.choose` allows, found one by one."""
    keys = [key for key in loads if key not in avoid] or list(loads)
    fewest = min(loads[key] for key in keys)
    most = fewest + max(min(2, fewest), fewest // 4)
    near = [key for key in keys if loads[key] <= most]
    best = max((router.num_known(key, chain), -loads[key]) for key in near)
    return {key for key in near if (router.num_known(key, chain), -loads[key]) == best}


@given(seed=st.integers(0, 10_000))
def test_choices_follow_the_rule_while_replicas_come_and_go(seed: int) -> None:
    rng = random.Random(seed)
    router, loads = PrefixRouter[str](), {}
    for _ in range(120):
        key = f"replica {rng.randrange(6)}"
        match rng.randrange(5):
            case 0 if key in loads:
                router.remove(key)
                del loads[key]
            case 0 | 1 if key not in loads:
                router.add(key, max_tokens=rng.choice((32, 64, 256)))
                loads[key] = 0
            case 2 if key in loads:
                loads[key] = rng.randrange(14)
                router.set_num_requests(key, loads[key])
            case 3 if key in loads and rng.random() < 0.1:
                router.forget_prompts(key)
        assert set(router) == set(loads)
        if not loads:
            continue
        kinds = [rng.randrange(2) for _ in range(rng.randrange(5))]
        chain = chain_of([kind for kind in kinds for _ in range(CHUNK)] + [9])
        avoid = {f"replica {rng.randrange(6)}" for _ in range(rng.randrange(3))}
        chosen = router.choose(chain, avoid=avoid)
        assert chosen in slow_choice(router, loads, avoid, chain)
        router.record(chosen, chain)
