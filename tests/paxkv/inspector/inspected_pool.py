"""A second implementation of the page's state, and its comparison with the pool."""

import dataclasses
import struct

from paxkv.contracts.observation import HASH_BYTES

RUNNING_WIDTH, WAITING_WIDTH, TABLE_WIDTH = 5, 4, 5


class PageState:
    """Applies frames; equals the pool when every frame is applied."""

    def __init__(self, snapshot):
        self.pool = snapshot.pool
        self.blocks = {}
        self.tables = {}
        self.requests = {}
        self.apply(snapshot)

    def apply(self, frame):
        for row in rows_of(frame.blocks):
            self.blocks[row[0]] = row[1:]
        for key, group_id, num_skipped, num_kept, new in table_rows_of(frame.tables):
            old = self.tables.get((key, group_id), [])
            assert len(old[num_skipped:num_kept]) == num_kept - num_skipped
            table = [0] * num_skipped + old[num_skipped:num_kept] + new
            self.tables[key, group_id] = table
        for info in frame.new_requests:
            self.requests[info.key] = info
        for key in frame.gone_keys:
            del self.requests[key]
        self.tables = {
            (key, group): table
            for (key, group), table in self.tables.items()
            if table and key in self.requests
        }
        self.running = frame.running
        self.waiting = frame.waiting
        self.eviction_head = frame.eviction_head
        self.num_free_blocks = frame.num_free_blocks
        self.counters = frame.counters

    def name(self, key):
        return self.requests[key].request_id

    def tables_by_name(self):
        return {(self.name(key), group): table for (key, group), table in self.tables.items()}


def table_rows_of(tables):
    """(key, group, skipped, kept, new ids) of each table."""
    ids = iter(struct.unpack(f"<{len(tables.new_block_ids) // 4}I", tables.new_block_ids))
    rows = [tables.rows[i : i + TABLE_WIDTH] for i in range(0, len(tables.rows), TABLE_WIDTH)]
    numbered = [(*row[:4], [next(ids) for _ in range(row[4])]) for row in rows]
    assert next(ids, None) is None
    return numbered


def rows_of(columns):
    """(id, ref count, hash, parent, depth, group, hits) of each block."""
    count = len(columns.ref_counts) // 2

    def numbers(code, data):
        return struct.unpack(f"<{count}{code}", data)

    def hashes(data):
        return [data[HASH_BYTES * i : HASH_BYTES * (i + 1)] for i in range(count)]

    ids = range(count) if columns.block_ids is None else numbers("I", columns.block_ids)
    return list(
        zip(
            ids,
            numbers("H", columns.ref_counts),
            hashes(columns.hashes),
            hashes(columns.parents),
            numbers("H", columns.depths),
            numbers("B", columns.groups),
            numbers("H", columns.num_hits),
            strict=True,
        )
    )


def check_equals_the_pool(page, scheduler):
    """Checks that the page's blocks and requests equal the scheduler's."""
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    for block in pool.blocks:
        ref_cnt, block_hash, _, depth, group, _ = page.blocks[block.block_id]
        assert ref_cnt == block.ref_cnt
        assert block_hash == (block.block_hash or bytes(HASH_BYTES))[:HASH_BYTES]
        assert group == (block.block_hash[-1] if block.block_hash else 0)
        assert depth == 0 or block.block_hash
    tables = {
        (req_id, group_id): [block.block_id for block in table]
        for group_id, single in enumerate(manager.coordinator.single_type_managers)
        for req_id, table in single.req_to_blocks.items()
        if table
    }
    assert page.tables_by_name() == tables
    running = page.running
    assert [page.name(key) for key in running[::RUNNING_WIDTH]] == [
        request.request_id for request in scheduler.running
    ]
    assert running[1::RUNNING_WIDTH] == [request.num_tokens for request in scheduler.running]
    assert [page.name(key) for key in page.waiting[::WAITING_WIDTH]] == [
        request.request_id for request in scheduler.waiting
    ]
    free = pool.free_block_queue.get_all_free_blocks()
    assert page.eviction_head == [block.block_id for block in free[: len(page.eviction_head)]]
    assert page.num_free_blocks == len(free)
    assert len(page.eviction_head) == min(len(free), 64)


def same_picture(one, other):
    """Whether two pages show the same state."""
    fields = ("blocks", "tables", "requests", "running", "waiting", "eviction_head")
    return all(getattr(one, name) == getattr(other, name) for name in fields) and (
        dataclasses.asdict(one.counters) == dataclasses.asdict(other.counters)
    )
