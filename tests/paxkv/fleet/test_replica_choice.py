"""Which replica computes a prompt: the load, stalls, and prompts that were sent before."""

import pytest

from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.engine_output import UtilityReply
from paxkv.contracts.engine_request import AbortRequests
from paxkv.errors import EngineDeadError
from paxkv.fleet.replica_choice import choose_replica
from tests.paxkv.client.fake_replicas import Replicas


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
    unreachable, dead = replicas.transport._replicas
    unreachable.is_unreachable = True
    assert choose_replica([unreachable, dead], []) is dead
    replicas.die(1)
    with pytest.raises(EngineDeadError, match="all engines have ended"):
        choose_replica([unreachable, dead], [])
