"""Block copies become a padded array, and change the pool as a simple model does."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paxkv.contracts.scheduler_output import BlockCopy, SchedulerOutput
from paxkv.errors import InvariantError
from paxkv.runner.batch.block_copies import build_block_copies
from paxkv.runner.shapes.program_shapes import TableShape
from paxkv.runner.shapes.step_buckets import StepBuckets
from tests.paxkv.no_cached import NO_CACHED

NUM_BLOCKS = 40
# Shapes of 8 and of 3 x 4 = 12 copies, since all groups count.
BUCKETS = StepBuckets(
    max_num_batched_tokens=8,
    max_num_seqs=3,
    max_decode_burst=1,
    tables=(
        TableShape(num_groups=3, max_blocks_per_req=5, block_size=8),
        TableShape(num_groups=1, max_blocks_per_req=3, block_size=16),
    ),
    max_model_len=5 * 8,
)


def output(copies):
    return SchedulerOutput(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=NO_CACHED,
        num_scheduled_tokens={},
        total_num_scheduled_tokens=0,
        preempted_req_ids=frozenset(),
        finished_req_ids=frozenset(),
        block_copies=[BlockCopy(source_block_id=s, target_block_id=t) for s, t in copies],
    )


def build(copies):
    return build_block_copies(output(copies), BUCKETS, num_blocks=NUM_BLOCKS)


def test_step_without_copies_needs_no_program():
    assert build([]) is None


def test_copies_are_padded_past_the_end_of_the_pool():
    copies_np = build([(3, 5), (6, 7), (0, 9)])
    assert copies_np.dtype == np.int32
    assert copies_np.tolist() == [[3, 6, 0] + [40] * 5, [5, 7, 9] + [40] * 5]


def test_each_step_gets_a_new_array():
    assert not np.shares_memory(build([(3, 5)]), build([(3, 5)]))


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 39), st.integers(1, 39)), min_size=1, max_size=12))
def test_pool_equals_a_simple_model_after_copies(copies):
    pool = np.arange(NUM_BLOCKS)
    expected = pool.copy()
    for source, target in copies:
        expected[target] = pool[source]
    sources, targets = build(copies)
    assert len(sources) in (8, 12)
    is_real = targets < NUM_BLOCKS
    pool[targets[is_real]] = pool[sources[is_real]]
    np.testing.assert_array_equal(pool, expected)


@pytest.mark.parametrize(
    ("copies", "message"),
    [
        ([(3, 0)], r"got targets \[0\] and sources \[\]"),
        ([(3, -1)], r"got targets \[-1\]"),
        ([(40, 3)], r"and sources \[40\]"),
        ([(1, t) for t in range(2, 15)], "at most 12 blocks, got 13"),
    ],
)
def test_impossible_copies_are_bugs(copies, message):
    with pytest.raises(InvariantError, match=message):
        build(copies)
