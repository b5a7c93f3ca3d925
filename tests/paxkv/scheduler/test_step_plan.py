"""StepPlan: what is decided is written down once, and a victim's share is taken back."""

from paxkv.contracts.engine_request import EngineRequest
from paxkv.kv_cache.block import KVCacheBlock
from paxkv.kv_cache.manager import KVCacheBlocks
from paxkv.sampling_params import SamplingParams
from paxkv.scheduler.request import Request
from paxkv.scheduler.step_plan import StepPlan


def make_request(request_id, *, num_computed_tokens=0, num_output_tokens=0):
    request = Request(
        EngineRequest(
            request_id=request_id, prompt_token_ids=[1, 2, 3], sampling_params=SamplingParams()
        ),
        max_num_tokens=20,
    )
    request.num_computed_tokens = num_computed_tokens
    for _ in range(num_output_tokens):
        request.append_output_token(9)
    return request


def blocks(*block_ids):
    return KVCacheBlocks(([KVCacheBlock(block_id) for block_id in block_ids],))


def test_each_kind_of_request_is_reported_in_its_way():
    plan = StepPlan(10)
    plan.add_running(make_request("a", num_computed_tokens=3, num_output_tokens=1), 1, blocks())
    plan.add_running(make_request("b", num_computed_tokens=4, num_output_tokens=2), 1, blocks(5))
    plan.add_new(make_request("c", num_computed_tokens=2), 1, blocks(6, 7))
    plan.add_resumed(make_request("d", num_computed_tokens=2, num_output_tokens=1), 2, blocks(8, 9))
    assert plan.token_budget == 5
    output = plan.build_output(frozenset({"z"}))

    assert output.num_scheduled_tokens == {"a": 1, "b": 1, "c": 1, "d": 2}
    assert output.total_num_scheduled_tokens == 5
    assert (output.finished_req_ids, output.preempted_req_ids) == ({"z"}, frozenset())
    (new,) = output.scheduled_new_reqs
    assert (new.req_id, new.prompt_token_ids, new.num_computed_tokens) == ("c", [1, 2, 3], 2)
    assert new.block_ids == ([6, 7],)
    cached = output.scheduled_cached_reqs
    assert cached.req_ids == ["a", "b", "d"]
    assert cached.resumed_req_ids == {"d"}
    assert cached.new_block_ids == [None, ([5],), ([8, 9],)]
    assert cached.num_computed_tokens == [3, 4, 2]
    assert cached.num_output_tokens == [1, 2, 1]
    assert cached.all_token_ids == {"d": [1, 2, 3, 9]}


def test_a_victim_gives_back_its_tokens_and_is_not_reported_as_scheduled():
    plan = StepPlan(10)
    victim, other = make_request("a"), make_request("b")
    plan.add_running(victim, 4, blocks(1))
    plan.add_running(other, 1, blocks())
    plan.add_preempted(victim)
    plan.add_preempted(make_request("never scheduled"))
    assert plan.token_budget == 9
    output = plan.build_output(frozenset())
    assert output.num_scheduled_tokens == {"b": 1}
    assert output.scheduled_cached_reqs.req_ids == ["b"]
    assert output.preempted_req_ids == {"a", "never scheduled"}


def test_the_output_does_not_change_with_the_request():
    plan = StepPlan(10)
    request = make_request("a", num_output_tokens=1)
    plan.add_resumed(request, 4, blocks(1))
    output = plan.build_output(frozenset())
    request.append_output_token(8)
    assert output.scheduled_cached_reqs.all_token_ids == {"a": [1, 2, 3, 9]}
