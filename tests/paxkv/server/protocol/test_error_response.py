"""Errors as HTTP responses."""

from paxkv.errors import EngineDeadError
from paxkv.server.protocol.error_response import error_response


def test_dead_engine_says_when_another_may_be_ready() -> None:
    response = error_response(EngineDeadError("it ended", retry_after_s=5))
    assert (response.status_code, response.headers["Retry-After"]) == (503, "5")
    assert "Retry-After" not in error_response(EngineDeadError("it ended")).headers
