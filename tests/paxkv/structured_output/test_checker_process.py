"""Grammars that cannot be compiled in time are rejected, and do not harm other requests."""

import concurrent.futures
import gc
import os
import signal
import socket
import time

import msgspec
import pytest

from paxkv.config.structured_outputs_params import StructuredOutputsParams
from paxkv.errors import EngineDeadError, InvalidRequestError
from paxkv.structured_output.checker_process import CheckerProcess, answer_trial
from tests.paxkv.structured_output.demo_grammars import SETUP, make_compiler

GOOD = StructuredOutputsParams(regex="a+")
BAD = StructuredOutputsParams(regex="(a")
# Whether any text fits all thirty patterns is a question that takes for ever.
ENDLESS = StructuredOutputsParams(
    json={"allOf": [{"type": "string", "pattern": f".*[a-z]{{{i}}}.*"} for i in range(1, 31)]}
)


@pytest.fixture(scope="module")
def checker():
    checker = CheckerProcess(**SETUP, max_compile_s=1.5)
    yield checker
    checker.close()


def test_good_grammars_pass_and_bad_ones_are_refused_with_the_reason(checker):
    for _ in range(2):  # the second answers are remembered ones
        checker.check(GOOD)
        with pytest.raises(InvalidRequestError, match="unclosed group") as raised:
            checker.check(BAD)
        assert raised.value.param == "structured_outputs.regex"


def test_numbers_that_json_does_not_have_are_not_replaced(checker):
    with pytest.raises(InvalidRequestError, match="#/const is NaN"):
        checker.check(StructuredOutputsParams(json={"const": float("nan")}))


def test_the_cache_key_of_a_long_grammar_is_short(checker):
    long = StructuredOutputsParams(choice=["a" * 1000, "b"])
    checker.check(long)
    assert checker.is_remembered(long)
    assert not checker.is_remembered(StructuredOutputsParams(choice=["a" * 1001, "b"]))
    assert max(map(len, checker._verdicts)) == 32


def test_an_endless_compilation_is_stopped_and_the_next_is_answered(checker):
    start_s = time.monotonic()
    with pytest.raises(InvalidRequestError, match="within 1.5 s"):
        checker.check(ENDLESS)
    assert time.monotonic() - start_s < 60
    # It is not tried again.
    assert checker.is_remembered(ENDLESS)
    with pytest.raises(InvalidRequestError, match="within 1.5 s"):
        checker.check(ENDLESS)
    checker.check(StructuredOutputsParams(regex="after it"))


def test_others_are_answered_meanwhile(checker):
    # The same schema as another text, without a stored verdict.
    endless = StructuredOutputsParams(json=ENDLESS.source_text + " ")
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        slow = pool.submit(checker.check, endless)
        for good in [StructuredOutputsParams(regex=f"b{i}") for i in range(4)]:
            pool.submit(checker.check, good).result(60)
        assert isinstance(slow.exception(60), InvalidRequestError)


def test_a_quick_check_decides_all_but_heavy_grammars(checker):
    # On a busy machine half a second may pass before one of them has had its turn, not each time.
    assert any(checker.check_quickly(StructuredOutputsParams(regex="quick")) for _ in range(20))
    with pytest.raises(InvalidRequestError, match="unclosed group"):
        for _ in range(20):
            checker.check_quickly(StructuredOutputsParams(regex="(quick"))
    heavy = StructuredOutputsParams(json=ENDLESS.source_text + "  ")
    assert not checker.check_quickly(heavy)
    assert not checker.is_remembered(heavy) and not checker.is_heavy(heavy)
    large = StructuredOutputsParams(
        json={"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1200)}}
    )
    # A fifth of a second, after which it is refused.
    with pytest.raises(InvalidRequestError, match="max is 1000"):
        checker.check(large)
    assert checker.is_heavy(large)
    assert not checker.is_heavy(StructuredOutputsParams(regex="quick"))


def test_a_killed_compiler_process_is_replaced_and_no_request_is_refused(checker):
    checker.check(StructuredOutputsParams(regex="before it"))
    (forker,) = checker._running
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        heavy = StructuredOutputsParams(json=ENDLESS.source_text + "   ")
        asked = pool.submit(checker.check, heavy)
        time.sleep(0.2)
        os.killpg(forker._process.pid, signal.SIGKILL)
        checker.check(StructuredOutputsParams(regex="after it was killed"))
        # Asked again, of the new one.
        with pytest.raises(InvalidRequestError, match="within 1.5 s"):
            asked.result(60)


def test_closing_ends_the_processes_and_fails_waiting_requests():
    # A trial that was left alone would go on for longer than is waited for here.
    checker = CheckerProcess(**SETUP | {"max_compile_s": 90.0})
    checker.check(GOOD)
    (forker,) = checker._running
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(checker.check, ENDLESS)
        time.sleep(0.2)
        checker.close()
        assert isinstance(asked.exception(30), EngineDeadError)
    assert not forker.is_alive
    with pytest.raises(EngineDeadError):
        checker.check(GOOD if not checker.is_remembered(GOOD) else BAD)


def test_an_unclosed_compiler_leaves_no_process():
    checker = CheckerProcess(**SETUP)
    checker.check(GOOD)
    (forker,) = checker._running
    del checker
    gc.collect()
    assert not forker.is_alive


def test_a_compile_check_is_answered_in_one_line_and_has_time_limits():
    ours, theirs = socket.socketpair()
    with ours, theirs, ours.makefile("rwb") as asked, theirs.makefile("rwb") as answered:
        for params, is_good in ((GOOD, True), (BAD, False)):
            trial = {"params": params, "compile_s": 100.0, "is_long": False}
            asked.write(msgspec.json.encode(trial) + b"\n")
            asked.flush()
            answer_trial(answered, make_compiler())
            assert (msgspec.json.decode(asked.readline())["problem"] is None) == is_good
    for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
        # What would have ended it.
        assert signal.setitimer(timer, 0)[0] > 0


def test_giving_up_a_wait_is_no_error():
    ours, theirs = socket.socketpair()
    with theirs:
        answered = theirs.makefile("rwb")
        trial = {"params": GOOD, "compile_s": 100.0, "is_long": False}
        ours.sendall(msgspec.json.encode(trial) + b"\n")
        ours.close()
        answer_trial(answered, make_compiler())
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
        with pytest.raises(BrokenPipeError):  # the reader was gone
            answered.close()


def test_ignored_keywords_are_remembered_and_logged_once(checker, caplog):
    params = StructuredOutputsParams(json={"items": {"uniqueItems": True}})
    assert checker.ignored_keywords(params) == ()
    for _ in range(2):
        checker.check(params)
    assert checker.ignored_keywords(params) == ("#/items/uniqueItems",)
    assert [r.args for r in caplog.records] == [("#/items/uniqueItems",)]
