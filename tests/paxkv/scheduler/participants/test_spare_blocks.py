"""Blocks of requests that do not run are freed one request at a time, in a fixed order."""

from paxkv.scheduler.participants.spare_blocks import SpareBlocks
from paxkv.scheduler.request import RequestStatus
from tests.paxkv.scheduler.in_memory_connector import InMemoryConnector, MemoryRunner
from tests.paxkv.scheduler.stepping import FunctionRunner, add, ids, make_scheduler, step


def test_kept_blocks_are_released_oldest_first_or_by_request_id():
    scheduler, runner = make_scheduler(), FunctionRunner()
    for name in "abc":
        add(scheduler, name, 5, max_tokens=1, keep_blocks=True)
    step(scheduler, runner)
    spare = scheduler.spare_blocks
    assert isinstance(spare, SpareBlocks)
    assert scheduler.make_stats().num_free_blocks == 93
    spare.release_kept("b")
    spare.release_kept("unknown")
    assert scheduler.make_stats().num_free_blocks == 95
    assert spare.release_oldest_kept()
    assert [request.request_id for request in scheduler.kept_requests] == ["c"]
    assert spare.release_oldest_kept()
    assert not spare.release_oldest_kept()
    assert scheduler.make_stats().num_free_blocks == 99


def test_loaded_blocks_are_dropped_from_the_end_of_the_queue():
    connector = InMemoryConnector(is_async=True)
    prompts = {name: [100 * i + j for j in range(9)] for i, name in enumerate("abc")}
    for prompt in prompts.values():
        connector.store(prompt)
    scheduler, runner = make_scheduler(connector=connector), MemoryRunner(connector)
    for name, prompt in prompts.items():
        add(scheduler, name, prompt, max_tokens=2)
    step(scheduler, runner)
    for name in "ab":
        runner.load(name)
    step(scheduler, runner, transfers={"finished_recving": frozenset("ab")})
    for name in "ab":
        assert scheduler.remote_kv.finish_loading(scheduler.requests[name])
        scheduler.requests[name].status = RequestStatus.WAITING
    # "c" is still being loaded, so its blocks cannot be freed.
    assert ids(scheduler.spare_blocks.loaded_requests()) == ["a", "b"]
    assert scheduler.spare_blocks.drop_last_loaded(scheduler.requests["b"])
    assert ids(scheduler.spare_blocks.loaded_requests()) == ["b"]
    assert not scheduler.spare_blocks.drop_last_loaded(scheduler.requests["b"])
    assert scheduler.kv_cache_manager.get_blocks("a").is_empty()
