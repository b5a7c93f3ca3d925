"""Detection of hanging engines, with made-up counts and times."""

from paxkv.fleet.step_watch import StepWatch


def first_alarm_s(checks, *, limit_s=10.0):
    """The time of the first alarm, for checks of (time, count, number of messages)."""
    watch = StepWatch(limit_s)
    return next(
        (at_s for at_s, count, num_sent in checks if watch.is_too_long(count, num_sent, at_s)), None
    )


def test_alarm_comes_when_the_count_has_not_changed_for_the_limit():
    assert first_alarm_s((at_s, 7, 1) for at_s in range(100, 200)) == 110


def test_idle_engine_and_steps_that_end_raise_no_alarm():
    assert first_alarm_s((at_s, 8, 1) for at_s in range(1000)) is None
    assert first_alarm_s((at_s, 2 * (at_s // 9) + 1, 1) for at_s in range(1000)) is None


def test_engine_that_does_not_wake_for_a_message_raises_an_alarm():
    assert first_alarm_s((at_s, 8, 1 + (at_s > 50)) for at_s in range(1000)) == 60
    # An engine that has not run yet.
    assert first_alarm_s((at_s, 0, int(at_s > 50)) for at_s in range(1000)) == 60


def test_long_gap_between_checks_counts_little():
    checks = [(0, 5, 1), (1, 5, 1), (10_000, 5, 1), (10_001, 5, 1)]
    assert first_alarm_s(checks) is None
    assert first_alarm_s([*checks, *((10_001 + i, 5, 1) for i in range(1, 20))]) == 10_007


def test_limit_0_never_raises_an_alarm():
    assert first_alarm_s(((at_s, 7, 1) for at_s in range(1000)), limit_s=0.0) is None


def test_start_over_resets_the_measured_time():
    watch = StepWatch(10.0)
    for at_s in range(10):
        assert not watch.is_too_long(7, 1, at_s)
    watch.start_over()
    assert not any(watch.is_too_long(7, 1, at_s) for at_s in range(10, 20))
