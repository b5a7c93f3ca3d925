"""Which engines are taken for hanging ones, by counts and times that are made up."""

from paxkv.fleet.step_watch import StepWatch


def first_alarm_s(looks, *, limit_s=10.0):
    """When a watch that looks at (time, count, messages) one after the other has had enough."""
    watch = StepWatch(limit_s)
    return next(
        (at_s for at_s, count, num_sent in looks if watch.is_too_long(count, num_sent, at_s)), None
    )


def test_step_is_too_long_when_its_limit_has_passed_since_it_was_first_seen():
    assert first_alarm_s((at_s, 7, 1) for at_s in range(100, 200)) == 110


def test_idle_engine_and_steps_that_end_are_never_too_long():
    assert first_alarm_s((at_s, 8, 1) for at_s in range(1000)) is None
    assert first_alarm_s((at_s, 2 * (at_s // 9) + 1, 1) for at_s in range(1000)) is None


def test_engine_that_does_not_wake_for_a_message_is_too_long():
    assert first_alarm_s((at_s, 8, 1 + (at_s > 50)) for at_s in range(1000)) == 60
    # One that has had nothing to do yet.
    assert first_alarm_s((at_s, 0, int(at_s > 50)) for at_s in range(1000)) == 60


def test_time_in_which_nobody_looked_counts_little():
    looks = [(0, 5, 1), (1, 5, 1), (10_000, 5, 1), (10_001, 5, 1)]
    assert first_alarm_s(looks) is None
    assert first_alarm_s([*looks, *((10_001 + i, 5, 1) for i in range(1, 20))]) == 10_007


def test_no_limit_is_none():
    assert first_alarm_s(((at_s, 7, 1) for at_s in range(1000)), limit_s=0.0) is None


def test_next_engine_may_stand_at_the_same_count():
    watch = StepWatch(10.0)
    for at_s in range(10):
        assert not watch.is_too_long(7, 1, at_s)
    watch.start_over()
    assert not any(watch.is_too_long(7, 1, at_s) for at_s in range(10, 20))
