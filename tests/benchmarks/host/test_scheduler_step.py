"""The decode that is timed is steady, and the admission that is timed is of a known prompt."""

from benchmarks.host.scheduler_step import (
    BLOCK_SIZE,
    make_decoding_scheduler,
    measure_admission,
    measure_decode,
    run_step,
)


def test_every_request_decodes_one_token_a_step_and_one_in_16_gets_a_block() -> None:
    scheduler = make_decoding_scheduler(32)
    pool = scheduler.kv_cache_manager.block_pool
    for _ in range(2 * BLOCK_SIZE):
        num_free, num_tokens = pool.get_num_free_blocks(), scheduler.num_scheduled_tokens
        run_step(scheduler)
        assert scheduler.num_scheduled_tokens - num_tokens == 32
        assert num_free - pool.get_num_free_blocks() == 32 // BLOCK_SIZE


def test_measurements_give_a_time_for_each_step() -> None:
    assert len(measure_decode(num_requests=3, num_steps=5)) == 5
    # They check themselves that the prompt is found.
    admissions, additions = measure_admission(num_repetitions=2)
    assert len(admissions) == len(additions) == 2 and min(admissions + additions) > 0
