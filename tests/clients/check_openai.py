"""The `openai` package: `python check_openai.py URL`. `tests/clients/run.sh` sets both up."""

import json
import sys

import openai

QUESTION = {"role": "user", "content": "What is 23 + 58?"}
# Few values, because the small demo model would write digits until it is cut off.
NUMBER = {"enum": [7, 23, 8, 58]}
PARAMETERS = {
    "type": "object",
    "properties": {"a": NUMBER, "b": NUMBER},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}


def main(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="client-key", max_retries=0)
    model = client.models.list().data[0].id
    fields = {"model": model, "messages": [QUESTION], "temperature": 0, "max_tokens": 64}
    text = client.chat.completions.create(**fields).choices[0].message.content
    assert "81" in text
    with client.chat.completions.stream(**fields) as stream:
        assert stream.get_final_completion().choices[0].message.content == text

    prompt = {"model": model, "prompt": "2 + 2 =", "temperature": 0, "max_tokens": 8}
    whole = client.completions.create(**prompt).choices[0].text
    parts = client.completions.create(stream=True, **prompt)
    assert "".join(part.choices[0].text for part in parts) == whole

    asked = {"model": model, "input": "What is 23 + 58?", "temperature": 0}
    answer = client.responses.create(**asked).output_text
    with client.responses.stream(**asked) as stream:
        assert stream.get_final_response().output_text == answer

    tools = fields | {"tools": [TOOL], "parallel_tool_calls": False}
    message = client.chat.completions.create(**tools, tool_choice="required").choices[0].message
    (call,) = message.tool_calls
    given = json.loads(call.function.arguments)
    with client.chat.completions.stream(**tools, tool_choice="required") as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert json.loads(streamed.function.arguments) == given
    result = {"role": "tool", "tool_call_id": call.id, "content": str(given["a"] + given["b"])}
    tools["messages"] = [QUESTION, message.model_dump(exclude_none=True), result]
    assert client.chat.completions.create(**tools).choices[0].finish_reason == "stop"

    try:
        client.chat.completions.create(**fields | {"model": "other"})
        raise AssertionError("NotFoundError was not raised")
    except openai.NotFoundError as error:
        assert error.code == "model_not_found"
    print(f"ok  openai {openai.__version__}: {text!r}, {answer!r}, add({given})")


if __name__ == "__main__":
    main(sys.argv[1])
