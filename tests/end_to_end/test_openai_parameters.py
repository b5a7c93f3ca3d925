"""Every parameter of the API, sent by the official client to the demo model, streamed and not."""

import json
import math
import re
import time

import httpx
import openai
import pytest

from tests.end_to_end.real_server import RealServer, running_server

# A server of its own takes a minute to compile its programs:
# `pytest -m slow tests/end_to_end/test_openai_parameters.py`.
pytestmark = pytest.mark.slow

MODEL = "paxkv-demo"
QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "ask", "parameters": {"type": "object"}}},
]
NAMED = {"type": "function", "function": {"name": "add"}}


@pytest.fixture(scope="module")
def server():
    arguments = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    arguments += ("--max-logprobs", "-1")
    # Few rows have few shapes to compile; the parameters are the same ones.
    small = ("--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--max-model-len", "640")
    with running_server(*arguments, *small) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RealServer):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client: openai.OpenAI, **fields: object) -> list[dict[str, object]]:
    """The choices of a chat; checked to be the same when they are streamed."""
    fields = {"model": MODEL, "messages": QUESTION, "max_tokens": 24, "seed": 7, **fields}
    whole = client.chat.completions.create(**fields)
    choices = [
        {
            "content": choice.message.content or "",
            "calls": [
                (call.function.name, call.function.arguments)
                for call in choice.message.tool_calls or ()
            ],
            "finish_reason": choice.finish_reason,
        }
        for choice in whole.choices
    ]
    streamed = [{"content": "", "calls": [], "finish_reason": None} for _ in choices]
    usage = None
    for chunk in client.chat.completions.create(
        stream=True, stream_options={"include_usage": True}, **fields
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            state = streamed[choice.index]
            state["content"] += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                if call.id is not None:
                    state["calls"].append((call.function.name, ""))
                name, arguments = state["calls"][call.index]
                arguments += call.function.arguments or ""
                state["calls"][call.index] = (name, arguments)
            state["finish_reason"] = choice.finish_reason or state["finish_reason"]
    assert streamed == choices
    assert usage.completion_tokens == whole.usage.completion_tokens
    return choices


def complete(client: openai.OpenAI, **fields: object) -> list[str]:
    """The texts of a completion; checked to be the same when they are streamed."""
    fields = {"model": MODEL, "max_tokens": 12, "seed": 3, **fields}
    whole = client.completions.create(**fields)
    texts = [""] * len(whole.choices)
    for chunk in client.completions.create(stream=True, **fields):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    return texts


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 0.8, "top_p": 0.9, "n": 3},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "n": 2},
        {"logit_bias": {"17": 5, "40": -100}},
        {"stop": ["4", "\n"], "temperature": 0},
        {"logprobs": True, "top_logprobs": 3},
        {"max_completion_tokens": 5, "user": "me", "metadata": {"a": "b"}, "store": False},
        {"extra_body": {"top_k": 5, "min_p": 0.05, "repetition_penalty": 1.2}},
        {"extra_body": {"min_tokens": 9, "stop_token_ids": [3], "ignore_eos": True}},
        {"extra_body": {"bad_words": ["42"], "priority": 1, "cache_salt": "me"}},
        {"extra_body": {"allowed_token_ids": [20, 21, 22, 23]}},
        {"extra_body": {"include_stop_str_in_output": True}, "stop": "2", "temperature": 0},
        {"extra_body": {"skip_special_tokens": False, "return_token_ids": True}},
        {"extra_body": {"truncate_prompt_tokens": 5, "chat_template_kwargs": {"x": 1}}},
        {"extra_body": {"use_beam_search": True}, "n": 2, "seed": None},
    ],
    ids=lambda fields: "-".join(fields.get("extra_body", fields)),
)
def test_a_streamed_chat_says_the_same(client, fields) -> None:
    choices = chat(client, **fields)
    assert len(choices) == fields.get("n", 1)


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"extra_body": {"structured_outputs": {"regex": r"\d{3}-[ab]{2}"}}}, r"\d{3}-[ab]{2}"),
        ({"extra_body": {"structured_outputs": {"choice": ["up", "down"]}}, "n": 3}, "up|down"),
        ({"extra_body": {"structured_outputs": {"grammar": 'start: "a" "b"+ "c"'}}}, "ab+c"),
        (
            {
                "extra_body": {"structured_outputs": {"regex": "(yes|no)( yes| no){3}"}},
                "presence_penalty": 1.5,
                "n": 4,
            },
            "(yes|no)( yes| no){3}",
        ),
    ],
    ids=["regex", "choice", "grammar", "with penalties"],
)
def test_grammars_bind_every_choice(client, fields, form) -> None:
    for choice in chat(client, max_tokens=120, **fields.copy()):
        if choice["finish_reason"] == "stop":
            assert re.fullmatch(form, choice["content"]), choice
        else:
            assert "b+" in form


DIGITS = {"structured_outputs": {"regex": r"\d{2,4}"}}
TAG = {
    "type": "tag",
    "begin": "<a>",
    "content": {"type": "regex", "pattern": "[xy]{1,3}z"},
    "end": ".",
}


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({**DIGITS, "ignore_eos": True}, r"\d{2,4}"),
        # Nothing may follow four digits: that is an end.
        ({**DIGITS, "min_tokens": 9}, r"\d{4}"),
        ({**DIGITS, "bad_words": ["1", "2", "34"]}, r"(?!.*34)[03-9]{2,4}"),
        ({**DIGITS, "allowed_token_ids": [19, 20, 21]}, r"[123]{2,4}"),
        ({"structured_outputs": {"structural_tag": {"format": TAG}}}, r"<a>[xy]{1,3}z\."),
    ],
    ids=["ignore_eos", "min_tokens", "bad_words", "allowed_token_ids", "structural tag"],
)
def test_other_fields_apply_together_with_a_grammar(client, fields, form) -> None:
    for seed in range(5):
        (choice,) = chat(client, extra_body=fields, max_tokens=100, seed=seed)
        assert choice["finish_reason"] == "stop"
        assert re.fullmatch(form, choice["content"]), choice


def test_a_form_without_a_token_left_is_refused(client) -> None:
    fields = {**DIGITS, "allowed_token_ids": [40, 41]}
    with pytest.raises(openai.BadRequestError, match="leave none of the tokens"):
        chat(client, extra_body=fields)


def test_json_has_its_schema(client) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    (choice,) = chat(client, response_format=form, max_tokens=400, temperature=0)
    if choice["finish_reason"] == "stop":
        value = json.loads(choice["content"])
        assert type(value["a"]) is int and value["b"] in ("x", "y")
    else:  # a small model may go on with one number for long
        assert re.match(r'\s*\{\s*"a"\s*:\s*-?\d+', choice["content"])


@pytest.mark.parametrize("tool_choice", ["required", NAMED, "auto", "none"], ids=str)
def test_tools_are_called_where_they_must_be(client, tool_choice) -> None:
    tools = TOOLS[:1] if tool_choice == "required" else TOOLS
    (choice,) = chat(client, tools=tools, tool_choice=tool_choice, max_tokens=500, temperature=0)
    if tool_choice in ("auto", "none"):  # the demo model has never seen a tool
        assert not choice["calls"] and choice["content"]
    else:
        assert choice["calls"][0][0] == "add"
        assert not choice["content"]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "12 + 30 ="},
        {"prompt": ["12 + 30 =", "7 + 8 ="], "n": 2},
        {"prompt": [40, 41, 42]},
        {"prompt": [[40, 41], [42]]},
        {"prompt": "a", "echo": True},
        {"prompt": "a", "echo": True, "max_tokens": 0},
        {"prompt": "a", "logprobs": 2, "best_of": 1},
        {"prompt": "a b", "logprobs": 2, "echo": True},
        {"prompt": "a b c", "extra_body": {"add_special_tokens": False, "min_p": 0.1}},
    ],
    ids=str,
)
def test_a_streamed_completion_says_the_same(client, fields) -> None:
    texts = complete(client, **fields)
    if fields.get("echo"):
        assert texts[0].startswith("a")
    if fields.get("max_tokens") == 0:
        assert texts == ["a"]


def test_an_echoed_prompt_is_scored_like_any_other_text(client) -> None:
    fields = {"model": MODEL, "logprobs": 2, "echo": True, "temperature": 0}
    first = client.completions.create(prompt="12 + 30 =", max_tokens=6, **fields).choices[0]
    again = client.completions.create(prompt=first.text, max_tokens=0, **fields).choices[0]
    assert again.text == first.text
    assert first.logprobs.token_logprobs[0] is None
    if again.logprobs.tokens == first.logprobs.tokens:  # text may be cut into other tokens
        assert again.logprobs.token_logprobs[1:] == pytest.approx(
            first.logprobs.token_logprobs[1:], abs=1e-3
        )
    chunks = client.completions.create(prompt="12 + 30 =", max_tokens=6, stream=True, **fields)
    parts = [choice.logprobs for chunk in chunks for choice in chunk.choices]
    assert [t for part in parts for t in part.tokens] == first.logprobs.tokens
    assert [o for part in parts for o in part.text_offset] == first.logprobs.text_offset


def test_the_best_of_four_are_the_likeliest_of_four(client) -> None:
    fields = {"model": MODEL, "prompt": "12 +", "max_tokens": 9, "seed": 5, "temperature": 1.5}
    drawn = client.completions.create(n=4, logprobs=0, **fields)
    means = {
        choice.text: sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)
        for choice in drawn.choices
    }
    assert len(means) > 2
    best = client.completions.create(n=2, best_of=4, **fields)
    ranked = sorted(means, key=means.get, reverse=True)
    assert [choice.text for choice in best.choices] == ranked[:2]
    assert best.usage == drawn.usage


def test_a_chat_returns_log_probabilities_of_its_prompt(client) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=1, extra_body={"prompt_logprobs": 1}
    )
    first, *others = answer.model_extra["prompt_logprobs"]
    assert first is None and len(others) == answer.usage.prompt_tokens - 1
    assert all(p["logprob"] <= 0 < p["rank"] for position in others for p in position.values())


def test_a_chat_continues_after_a_tool_answer(client, server) -> None:
    schema = {**SCHEMA, "properties": {"b": {"enum": ["x", "y"]}}, "required": ["b"]}
    tools = [{"type": "function", "function": {"name": "add", "parameters": schema}}]
    fields = {"model": MODEL, "tools": tools, "max_tokens": 200, "temperature": 0}
    first = client.chat.completions.create(messages=QUESTION, tool_choice=NAMED, **fields)
    message = first.choices[0].message
    (call,) = message.tool_calls
    # As it came, and as clients write it that leave out what is null.
    for said in (message, message.model_dump(exclude_none=True)):
        turns = [*QUESTION, said, {"role": "tool", "tool_call_id": call.id, "content": "42"}]
        for tool_choice in ("none", "auto"):
            answer = client.chat.completions.create(
                messages=turns, tool_choice=tool_choice, **fields
            )
            assert answer.usage.prompt_tokens > first.usage.prompt_tokens
    turns = [*QUESTION, message.model_dump(exclude_none=True)]
    ids = httpx.post(f"{server.url}/tokenize", json={"messages": turns}, timeout=60).json()[
        "tokens"
    ]
    text = httpx.post(f"{server.url}/detokenize", json={"tokens": ids}, timeout=60).json()["prompt"]
    assert '<tool_call>\n{"name": "add", "arguments": {"b"' in text


def test_answer_and_prompt_have_log_probabilities_of_the_whole_vocabulary(client) -> None:
    fields = {"model": MODEL, "prompt": "12 + 30 =", "temperature": 0, "max_tokens": 2}
    few = client.completions.create(logprobs=20, **fields).choices[0].logprobs
    answer = client.completions.create(logprobs=-1, extra_body={"prompt_logprobs": -1}, **fields)
    (choice,) = answer.choices
    for top, all_tokens in zip(few.top_logprobs, choice.logprobs.top_logprobs, strict=True):
        # Different tokens may have the same text.
        assert len(all_tokens) > 500
        for text, logprob in top.items():
            assert all_tokens[text] == pytest.approx(logprob, abs=1e-3)
    first, *others = choice.model_extra["prompt_logprobs"]
    assert first is None
    for position in others:
        assert sum(math.exp(p["logprob"]) for p in position.values()) == pytest.approx(1, abs=1e-3)


def test_responses_stream_the_same(client) -> None:
    fields = {"model": MODEL, "input": "What is 2 + 2?", "temperature": 0, "max_output_tokens": 20}
    whole = client.responses.create(**fields)
    *_, last = client.responses.create(stream=True, **fields)
    assert last.response.output_text == whole.output_text != ""
    assert last.response.usage == whole.usage


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_continues_the_previous_one(client, stream) -> None:
    def create(**fields: object):
        answer = client.responses.create(
            model=MODEL, temperature=0, max_output_tokens=20, stream=stream, **fields
        )
        return list(answer)[-1].response if stream else answer

    first = create(input="What is 2 + 2?")
    second = create(input="What is 12 + 30?", previous_response_id=first.id)
    said = [{"role": "user", "content": "What is 2 + 2?"}]
    said += [{"role": "assistant", "content": first.output_text}]
    whole = create(input=[*said, {"role": "user", "content": "What is 12 + 30?"}], store=False)
    assert second.output_text == whole.output_text
    assert second.usage.input_tokens == whole.usage.input_tokens > first.usage.input_tokens
    assert client.responses.retrieve(second.id).output_text == second.output_text
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(whole.id)


def test_a_response_is_made_in_the_background_or_cancelled(client) -> None:
    fields = {"model": MODEL, "input": "What is 2 + 2?", "temperature": 0, "background": True}
    begun = client.responses.create(max_output_tokens=20, **fields)
    assert (begun.status, begun.output_text) == ("queued", "")
    deadline = time.monotonic() + 120
    while (found := client.responses.retrieve(begun.id)).status == "queued":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert found.status == "completed" and "4" in found.output_text
    long = fields | {"extra_body": {"ignore_eos": True}}
    ended = client.responses.cancel(client.responses.create(**long).id)
    assert (ended.status, ended.output_text) == ("cancelled", "")


def test_what_cannot_be_compiled_is_a_400_with_the_reason(client, server) -> None:
    with pytest.raises(openai.BadRequestError, match="unclosed group"):
        chat(client, extra_body={"structured_outputs": {"regex": "(a"}})
    endless = {"allOf": [{"type": "string", "pattern": f".*[a-z]{{{i}}}.*"} for i in range(1, 31)]}
    with pytest.raises(openai.BadRequestError, match="cannot be compiled within"):
        chat(client, extra_body={"structured_outputs": {"json": endless}})
    (choice,) = chat(client, extra_body={"structured_outputs": {"choice": ["fine"]}})
    assert choice["content"] == "fine"
    metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
    assert re.search(r"^vllm:num_requests_running(\{[^}]*\})? 0", metrics, re.M)
    assert re.search(r"^paxkv_compiles_after_ready_total(\{[^}]*\})? 0", metrics, re.M)
