"""Frames of many waiting requests, and of pools with permanent blocks of layers."""

from paxkv.inspector.frame_maker import MAX_WAITING_ROWS, FrameMaker
from tests.paxkv.inspector.inspected_pool import WAITING_WIDTH
from tests.paxkv.scheduler.stepping import FULL, add, make_scheduler, window


def test_number_of_waiting_rows_is_limited():
    scheduler = make_scheduler()
    frames = FrameMaker(scheduler)
    for i in range(MAX_WAITING_ROWS + 5):
        add(scheduler, f"r{i}", 4)
    frame = frames.make_delta(1.0)
    assert len(frame.waiting) == MAX_WAITING_ROWS * WAITING_WIDTH
    assert len(frame.new_requests) == MAX_WAITING_ROWS
    assert frame.num_waiting == MAX_WAITING_ROWS + 5


def test_snapshot_describes_the_pool_and_its_groups():
    frame = FrameMaker(make_scheduler(specs=(FULL, window(8)))).make_snapshot(1.0)
    assert frame.pool.num_blocks == 100 and frame.pool.enable_prefix_caching
    assert [(g.kind, g.block_size, g.window) for g in frame.pool.groups] == [
        ("full_attention", 4, None),
        ("sliding_window", 4, 8),
    ]
