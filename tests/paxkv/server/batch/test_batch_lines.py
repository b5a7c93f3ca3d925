"""Each line of a batch becomes a request, or an error that names the line and its custom_id."""

import json

import pytest

from paxkv.server.batch.batch_lines import BatchLineError, BatchLineReader

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def line_with(**fields):
    return json.dumps(GOOD | fields).encode()


def line_without(name):
    return json.dumps({key: value for key, value in GOOD.items() if key != name}).encode()


def test_the_body_of_a_line_is_kept_unchanged():
    body = b'{ "prompt": "x", "seed": 123456789012345678901234567890, "top_p": 1e-1}'
    line = line_without("body")[:-1] + b', "body": ' + body + b"}\r"
    request = BatchLineReader().read(b"\xef\xbb\xbf" + line, 1)
    assert (request.custom_id, request.url, request.body) == ("a", "/v1/completions", body)


@pytest.mark.parametrize(
    ("line", "words", "param", "custom_id"),
    [
        (b"what?", "line 7 must be a JSON object", None, None),
        (b"[1]", "line 7 must be a JSON object", None, None),
        (b'{"body": ' + b"[" * 100_000, "line 7 must be a JSON object", None, None),
        (line_with()[:-2], "line 7 must be a JSON object", None, None),
        (line_without("custom_id"), "line 7 has no custom_id", "custom_id", None),
        (line_with(custom_id=3), "custom_id of line 7 must be a string", "custom_id", None),
        (line_with(custom_id=None), "custom_id of line 7 must be a string", "custom_id", None),
        (
            line_with().replace(b'"a"', b'"\xff"'),
            "custom_id of line 7 must be a string",
            "custom_id",
            None,
        ),
        (line_without("method"), "line 7 has no method", "method", "a"),
        (line_with(method="GET"), "must be POST, got 'GET'", "method", "a"),
        (line_without("url"), "line 7 has no url", "url", "a"),
        (line_with(url="/v1/embeddings"), "or /v1/completions, got '/v1/embed", "url", "a"),
        (line_with(url=["/v1/completions"]), "url of line 7 must be a string", "url", "a"),
        (line_without("body"), "line 7 has no body", "body", "a"),
        (line_with(body={"prompt": "x", "stream": True}), "leave stream out", "stream", "a"),
    ],
)
def test_an_error_names_its_line(line, words, param, custom_id):
    with pytest.raises(BatchLineError) as raised:
        BatchLineReader().read(line, 7)
    assert words in str(raised.value)
    assert (raised.value.param, raised.value.custom_id) == (param, custom_id)


@pytest.mark.parametrize("body", [None, [], "x", {}, {"stream": False}, {"stream": "yes"}])
def test_other_errors_in_a_body_are_left_to_the_route(body):
    request = BatchLineReader().read(line_with(body=body), 1)
    assert json.loads(request.body) == body


def test_a_custom_id_may_appear_once_in_a_file():
    reader = BatchLineReader()
    reader.read(line_with(), 1)
    reader.read(line_with(custom_id="b"), 2)
    with pytest.raises(BatchLineError, match="'a' of line 3 was used by an earlier line") as raised:
        reader.read(line_with(), 3)
    assert (raised.value.param, raised.value.custom_id) == ("custom_id", "a")
    with pytest.raises(BatchLineError):
        reader.read(line_with(custom_id="c", url="/v1/nothing"), 4)
    with pytest.raises(BatchLineError, match="earlier line"):
        reader.read(line_with(custom_id="c"), 5)
    assert BatchLineReader().read(line_with(), 1).custom_id == "a"
