"""The measured decode is steady, and the measured admission is of a cached prompt."""

import json

import pytest

from benchmarks import host
from benchmarks.host import BLOCK_SIZE, make_decoding_scheduler, run_step


@pytest.fixture(autouse=True)
def small_pool(monkeypatch) -> None:
    """Making a pool of the usual size would take longer than the steps of these tests."""
    monkeypatch.setattr(host, "NUM_BLOCKS", 4001)


def test_every_request_decodes_one_token_per_step_and_one_in_16_gets_a_block() -> None:
    scheduler = make_decoding_scheduler(32)
    pool = scheduler.kv_cache_manager.block_pool
    for _ in range(2 * BLOCK_SIZE):
        num_free, num_tokens = pool.get_num_free_blocks(), scheduler.num_scheduled_tokens
        run_step(scheduler)
        assert scheduler.num_scheduled_tokens - num_tokens == 32
        assert num_free - pool.get_num_free_blocks() == 32 // BLOCK_SIZE


def test_command_writes_a_row_per_figure(tmp_path) -> None:
    out = tmp_path / "rows.jsonl"
    flags = ["--num-running", "3", "--num-steps", "5", "--num-admissions", "2", "--out", str(out)]
    assert host.main([*flags, "--slots", "none", "2x3"]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert {"num_running=3", "num_running=3 slots=2x3"} <= {row["case"] for row in lines}
    rows = {row["metric"]: row for row in lines}
    # Admission checks itself that the prompt is found in the cache.
    assert set(rows) == {"decode_step_us", "host_step_us", "admission_us", "add_request_us"}
    assert rows["decode_step_us"]["num_repetitions"] == 5
    assert rows["host_step_us"]["num_repetitions"] == 5


def test_requests_with_slots_save_their_states() -> None:
    scheduler = make_decoding_scheduler(32, slots=(2, 3))
    (states,) = scheduler.kv_cache_manager.coordinator.state_managers
    for _ in range(3 * BLOCK_SIZE):
        run_step(scheduler)
    # Each request has passed at least two multiples of the block size, and writes a third slot.
    assert states.num_held_blocks == 32 * 3 * 6
