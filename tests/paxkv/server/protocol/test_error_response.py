"""Errors as HTTP responses."""

import json

from paxkv.errors import EngineDeadError, SlowReaderError
from paxkv.server.protocol.error_response import error_response


def test_a_dead_engine_answers_with_retry_after() -> None:
    response = error_response(EngineDeadError("it ended", retry_after_s=5))
    assert (response.status_code, response.headers["Retry-After"]) == (503, "5")
    assert "Retry-After" not in error_response(EngineDeadError("it ended")).headers


def test_a_slow_reader_gets_an_error_and_nothing_is_logged(caplog) -> None:
    response = error_response(SlowReaderError("read faster"))
    error = json.loads(response.body)["error"]
    assert response.status_code == 408
    assert (error["message"], error["code"]) == ("read faster", "slow_reader")
    assert error["type"] == "invalid_request_error"
    assert not caplog.records
