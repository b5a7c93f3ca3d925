"""The error tree: callers' mistakes are 4xx, ours are 5xx."""

import pytest

from paxkv import errors


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.PromptTooLongError("x"), 400),
        (errors.NeverFitsError("x"), 400),
        (errors.UnsupportedFeatureError("x"), 400),
        (errors.EngineDeadError("x"), 503),
        (errors.InvariantError("x"), 500),
    ],
)
def test_each_error_knows_its_http_status(error: errors.PaxkvError, status: int) -> None:
    assert error.http_status == status


def test_callers_mistakes_are_value_errors_that_name_the_field() -> None:
    error = errors.PromptTooLongError("too long", param="prompt")
    assert isinstance(error, ValueError)
    assert error.param == "prompt"
