"""Drives `/v1/messages` with the `anthropic` package: `python check_anthropic.py URL`.

`tests/clients/run.sh` installs the package and starts the server, with the flags that this needs.
"""

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anthropic

MODEL, KEY = "paxkv-demo", "client-key"
QUESTION = {"role": "user", "content": "What is 23 + 58?"}
TOOL = {
    "name": "add",
    "description": "Adds two numbers.",
    "input_schema": {
        "type": "object",
        # Few values, because the small demo model would write digits until it is cut off.
        "properties": {"a": {"enum": [7, 23]}, "b": {"enum": [8, 58]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}
# More than the server runs at once; it may let none wait.
NUM_AT_ONCE = 400


def main(url: str) -> None:
    """Runs all checks, and names each that passed."""
    with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0) as client:
        for check in (
            check_whole,
            check_stream,
            check_events,
            check_count,
            check_stops,
            check_prefill,
            check_structured_output,
            check_tool_loop,
            check_streamed_tool_loop,
            check_errors,
        ):
            print(f"ok  {check.__name__}: {check(client)}", flush=True)
    print(f"ok  check_keys: {check_keys(url)}")
    print(f"ok  check_overload: {asyncio.run(check_overload(url))}")


def ask(*, extra_body: dict[str, object] | None = None, **fields: object) -> dict[str, object]:
    # Later versions of the package have no argument for the temperature.
    body = {"temperature": 0} | (extra_body or {})
    return {"model": MODEL, "max_tokens": 64, "messages": [QUESTION], "extra_body": body} | fields


def check_whole(client: anthropic.Anthropic) -> str:
    """Text, system prompt as blocks, and the token counts."""
    message = client.messages.create(**ask())
    assert [block.type for block in message.content] == ["text"]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.output_tokens > 0 and message._request_id
    system = [{"type": "text", "text": "Answer.", "cache_control": {"type": "ephemeral"}}]
    assert client.messages.create(**ask(system=system, metadata={"user_id": "u"})).content
    return f"{message.content[0].text!r}, {message.usage.input_tokens} input tokens"


def check_stream(client: anthropic.Anthropic) -> str:
    """The helper that joins events gives the same message as a request without a stream."""
    whole = client.messages.create(**ask())
    with client.messages.stream(**ask()) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    return f"{text!r}"


def check_events(client: anthropic.Anthropic) -> str:
    types = [event.type for event in client.messages.create(stream=True, **ask())]
    order = [t for i, t in enumerate(types) if i == 0 or types[i - 1] != t]
    assert order == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    return f"{len(types)} events"


def check_count(client: anthropic.Anthropic) -> str:
    fields = {"model": MODEL, "messages": [QUESTION], "system": "Answer.", "tools": [TOOL]}
    counted = client.messages.count_tokens(**fields).input_tokens
    usage = client.messages.create(max_tokens=1, **fields).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens
    return f"{counted} tokens"


def check_stops(client: anthropic.Anthropic) -> str:
    cut = client.messages.create(**ask(max_tokens=2))
    assert cut.stop_reason == "max_tokens" and cut.usage.output_tokens == 2
    stopped = client.messages.create(**ask(stop_sequences=["nowhere", "="]))
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "=")
    assert "=" not in stopped.content[0].text
    return "max_tokens, stop_sequence"


def check_prefill(client: anthropic.Anthropic) -> str:
    begun = {"role": "assistant", "content": "23 + 58 ="}
    message = client.messages.create(**ask(messages=[QUESTION, begun]))
    assert message.content[0].text.lstrip().startswith("81")
    return f"{message.content[0].text!r}"


def check_structured_output(client: anthropic.Anthropic) -> str:
    schema = TOOL["input_schema"]
    form = {"type": "json_schema", "schema": schema}
    message = client.messages.create(**ask(output_config={"format": form}))
    assert set(json.loads(message.content[0].text)) == {"a", "b"}
    return message.content[0].text


def check_tool_loop(client: anthropic.Anthropic) -> str:
    return tool_loop(lambda fields: client.messages.create(**fields))


def check_streamed_tool_loop(client: anthropic.Anthropic) -> str:
    def answer(fields: dict[str, object]) -> anthropic.types.Message:
        with client.messages.stream(**fields) as stream:
            return stream.get_final_message()

    return tool_loop(answer)


def tool_loop(answer: Callable[[dict[str, object]], anthropic.types.Message]) -> str:
    """Forces a call by both choices that do; then lets the model answer."""
    messages: list[object] = [QUESTION]
    calls = []
    for choice in ({"type": "tool", "name": "add"}, {"type": "any"}, {"type": "auto"}):
        choice |= {"disable_parallel_tool_use": True}
        message = answer(ask(tools=[TOOL], tool_choice=choice, messages=messages))
        messages.append({"role": "assistant", "content": message.content})
        if message.stop_reason != "tool_use":
            break
        results = []
        for call in message.content:
            assert call.type == "tool_use" and set(call.input) == {"a", "b"}
            calls.append(call.input)
            total = str(call.input["a"] + call.input["b"])
            results.append({"type": "tool_result", "tool_use_id": call.id, "content": total})
        messages.append({"role": "user", "content": results})
    assert len(calls) == 2 and message.stop_reason == "end_turn"
    return f"{calls}, then {message.content[0].text!r}"


@contextmanager
def raises(error_class: type[anthropic.APIStatusError], kind: str, words: str) -> Iterator[None]:
    try:
        yield
    except anthropic.APIStatusError as error:
        assert type(error) is error_class, repr(error)
        assert error.body["error"]["type"] == kind and words in str(error), repr(error)
        assert error.request_id == error.body["request_id"]
        return
    raise AssertionError(f"{error_class.__name__} was not raised")


def check_errors(client: anthropic.Anthropic) -> str:
    create = client.messages.create
    with raises(anthropic.NotFoundError, "not_found_error", MODEL):
        create(**ask(model="claude"))
    bad = (anthropic.BadRequestError, "invalid_request_error")
    with raises(*bad, "max_tokens must be in"):
        create(**ask(max_tokens=0))
    with raises(*bad, "inference_geo is not supported"):
        create(**ask(extra_body={"inference_geo": "us"}))
    with raises(*bad, "messages[0].content[0].type"):
        image = {"type": "image", "source": {"type": "url", "url": "https://example.org"}}
        create(**ask(messages=[{"role": "user", "content": [image]}]))
    with raises(*bad, "prompt is too long: "):
        create(**ask(messages=[{"role": "user", "content": "1 + " * 2000}]))
    with raises(*bad, "messages must not be empty"):
        create(stream=True, **ask(messages=[]))
    with raises(anthropic.ContentTooLargeError, "request_too_large", "--max-body-bytes"):
        create(**ask(system="a" * 5_000_000))
    return "NotFoundError, BadRequestError, ContentTooLargeError"


def check_keys(url: str) -> str:
    with anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0) as client:
        with raises(anthropic.AuthenticationError, "authentication_error", "x-api-key"):
            client.messages.create(**ask())
    with anthropic.Anthropic(base_url=url, auth_token=KEY, max_retries=0) as client:
        assert client.messages.create(**ask()).content
    return "AuthenticationError; Bearer works too"


async def check_overload(url: str) -> str:
    """Requests that find no place raise OverloadedError; the others are answered."""
    async with anthropic.AsyncAnthropic(base_url=url, api_key=KEY, max_retries=0) as client:
        answers = await asyncio.gather(
            *(client.messages.create(**ask()) for _ in range(NUM_AT_ONCE)), return_exceptions=True
        )
    errors = [answer for answer in answers if isinstance(answer, Exception)]
    assert errors and all(type(error) is anthropic.OverloadedError for error in errors), errors[:1]
    assert len(errors) < NUM_AT_ONCE
    return f"{len(errors)} of {NUM_AT_ONCE} refused"


if __name__ == "__main__":
    main(sys.argv[1])
