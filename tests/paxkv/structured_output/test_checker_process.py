"""What cannot be compiled in time is refused, and harms nobody else."""

import concurrent.futures
import io
import time

import msgspec
import pytest

from paxkv.errors import InvalidRequestError
from paxkv.structured_output.checker_process import CheckerProcess, serve
from paxkv.structured_outputs_params import StructuredOutputsParams
from tests.paxkv.structured_output.demo_grammars import SETUP

GOOD = StructuredOutputsParams(regex="a+")
BAD = StructuredOutputsParams(regex="(a")
# Whether any text fits all thirty patterns is a question that takes for ever.
ENDLESS = StructuredOutputsParams(
    json={"allOf": [{"type": "string", "pattern": f".*[a-z]{{{i}}}.*"} for i in range(1, 31)]}
)


@pytest.fixture(scope="module")
def checker():
    checker = CheckerProcess(**SETUP, max_compile_s=0.7)
    yield checker
    checker.close()


def test_good_grammars_pass_and_bad_ones_are_refused_with_the_reason(checker):
    for _ in range(2):  # the second answers are remembered ones
        checker.check(GOOD)
        with pytest.raises(InvalidRequestError, match="unclosed group") as raised:
            checker.check(BAD)
        assert raised.value.param == "structured_outputs"


def test_what_is_remembered_of_a_grammar_is_as_short_for_a_long_one(checker):
    long = StructuredOutputsParams(choice=["a" * 1000, "b"])
    checker.check(long)
    assert checker.is_remembered(long)
    assert not checker.is_remembered(StructuredOutputsParams(choice=["a" * 1001, "b"]))
    assert max(map(len, checker._verdicts)) == 32


def test_an_endless_one_is_given_up_and_the_next_is_answered(checker):
    start_s = time.monotonic()
    with pytest.raises(InvalidRequestError, match="within 0.7 s"):
        checker.check(ENDLESS)
    with pytest.raises(InvalidRequestError):
        checker.check(ENDLESS)
    assert time.monotonic() - start_s < 5
    checker.check(StructuredOutputsParams(regex="after it"))


def test_others_are_answered_meanwhile(checker):
    # Another text of the same, which nobody remembers.
    endless = StructuredOutputsParams(json=ENDLESS.source_text + " ")
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        slow = pool.submit(checker.check, endless)
        for good in [StructuredOutputsParams(regex=f"b{i}") for i in range(4)]:
            pool.submit(checker.check, good).result(20)
        assert isinstance(slow.exception(20), InvalidRequestError)


def test_after_the_close_no_process_is_left():
    checker = CheckerProcess(**SETUP)
    checker.check(GOOD)
    (process,) = checker._idle
    checker.close()
    assert process.poll() is not None


def test_the_process_answers_every_line_until_there_are_no_more():
    lines = [SETUP, GOOD, BAD, GOOD]
    answers = io.BytesIO()
    serve(io.BytesIO(b"".join(msgspec.json.encode(line) + b"\n" for line in lines)), answers)
    errors = [msgspec.json.decode(line)["error"] for line in answers.getvalue().splitlines()]
    assert [error is None for error in errors] == [True, True, False, True]
