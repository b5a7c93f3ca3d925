"""Every request gets its tokens computed once, in its own blocks, within the step's budget."""

import random

import pytest

from benchmarks.gpu.plain_schedule import PlainSchedule, StepLimits
from benchmarks.workloads import Workload, WorkloadRequest


def limits(**changes) -> StepLimits:
    fields = {"block_size": 4, "num_blocks": 65, "max_num_seqs": 4, "max_num_batched_tokens": 8}
    return StepLimits(**(fields | changes))


def workload(*lengths: tuple[int, int]) -> Workload:
    return Workload(
        name="w",
        requests=[
            WorkloadRequest(prompt_token_ids=list(range(prompt)), num_output_tokens=output)
            for prompt, output in lengths
        ],
    )


def scheduled(schedule: PlainSchedule, max_decode_steps: int = 1) -> list[tuple[dict, int]]:
    """What each step computes, and in how many steps."""
    steps = []
    while (output := schedule.next_step(max_decode_steps)) is not None:
        steps.append((output.num_scheduled_tokens, output.num_decode_steps))
    return steps


def test_prompts_are_split_over_steps_behind_the_decodes():
    schedule = PlainSchedule(workload((6, 3), (5, 2)), limits(), name="a")
    assert scheduled(schedule) == [
        ({"a.0": 6, "a.1": 2}, 1),
        ({"a.0": 1, "a.1": 3}, 1),
        ({"a.0": 1, "a.1": 1}, 1),
    ]


def test_prompts_first_lets_nobody_decode_before_all_prompts_are_computed():
    schedule = PlainSchedule(workload((6, 3), (5, 3)), limits(), name="a", prompts_first=True)
    assert scheduled(schedule) == [
        ({"a.0": 6, "a.1": 2}, 1),
        ({"a.1": 3}, 1),
        ({"a.0": 1, "a.1": 1}, 1),
        ({"a.0": 1, "a.1": 1}, 1),
    ]


def test_bursts_end_for_each_request_where_it_ends():
    schedule = PlainSchedule(workload((2, 4), (2, 7)), limits(), name="a")
    assert scheduled(schedule, 4) == [
        ({"a.0": 2, "a.1": 2}, 1),
        ({"a.0": 3, "a.1": 4}, 4),
        ({"a.1": 2}, 2),
    ]


def test_a_burst_ends_with_the_first_of_its_requests_while_others_wait():
    schedule = PlainSchedule(workload((2, 3), (2, 9), (2, 2)), limits(max_num_seqs=2), name="a")
    assert scheduled(schedule, 8)[1:3] == [
        ({"a.0": 2, "a.1": 2}, 2),
        ({"a.1": 1, "a.2": 2}, 1),
    ]


def test_who_ended_is_told_once_also_at_the_end():
    schedule = PlainSchedule(workload((2, 1), (2, 3)), limits(), name="a")
    told = [sorted(schedule.next_step().finished_req_ids) for _ in range(3)]
    assert told == [[], ["a.0"], []]
    assert schedule.next_step() is None
    assert sorted(schedule.end().finished_req_ids) == ["a.1"]
    assert not schedule.end().finished_req_ids


def test_end_in_the_middle_tells_of_all_that_were_started():
    schedule = PlainSchedule(workload((8, 3), (8, 3)), limits(), name="a")
    schedule.next_step()
    assert sorted(schedule.end().finished_req_ids) == ["a.0"]
    assert schedule.next_step() is None


def test_request_that_can_never_fit_is_refused():
    with pytest.raises(ValueError, match="needs 3 KV blocks, and there are 2"):
        PlainSchedule(workload((8, 4)), limits(num_blocks=3), name="a")


@pytest.mark.parametrize("seed", range(20))
def test_any_workload_is_computed_exactly_once(seed):
    rng = random.Random(seed)
    lengths = [(rng.randint(1, 20), rng.randint(1, 20)) for _ in range(rng.randint(1, 30))]
    bounds = limits(num_blocks=rng.randint(12, 40), max_num_seqs=rng.randint(1, 6))
    schedule = PlainSchedule(workload(*lengths), bounds, name="a")
    computed: dict[str, int] = {}
    blocks: dict[str, list[int]] = {}
    while (output := schedule.next_step(rng.randint(1, 5))) is not None:
        for req_id in output.finished_req_ids:
            prompt, num_output = lengths[int(req_id.removeprefix("a."))]
            assert computed[req_id] == prompt + num_output - 1
            del blocks[req_id]
        for new in output.scheduled_new_reqs:
            assert new.req_id not in computed
            computed[new.req_id] = 0
            blocks[new.req_id] = new.block_ids[0]
        cached = output.scheduled_cached_reqs
        assert [computed[req_id] for req_id in cached.req_ids] == cached.num_computed_tokens
        held = [block_id for block_ids in blocks.values() for block_id in block_ids]
        assert len(held) == len(set(held)) and 0 not in held
        assert max(held) < bounds.num_blocks and len(blocks) <= bounds.max_num_seqs
        num_tokens = output.num_scheduled_tokens
        assert output.total_num_scheduled_tokens == sum(num_tokens.values()) > 0
        assert set(num_tokens) == {r.req_id for r in output.scheduled_new_reqs} | set(
            cached.req_ids
        )
        if output.num_decode_steps == 1:
            assert sum(num_tokens.values()) <= bounds.max_num_batched_tokens
        assert max(num_tokens.values()) == output.num_decode_steps or output.num_decode_steps == 1
        for req_id, count in num_tokens.items():
            computed[req_id] += count
            assert computed[req_id] <= len(blocks[req_id]) * bounds.block_size
    assert list(computed.values()) == [prompt + output - 1 for prompt, output in lengths]
