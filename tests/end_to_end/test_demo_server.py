"""The real server with the demo model: concurrent streams, lost clients, bad input."""

import asyncio
import json
import re
import time

import httpx
import openai
import pytest

from paxkv import LLM, SamplingParams
from tests.end_to_end.demo_prompts import demo_conversations, sum_is_right
from tests.end_to_end.real_server import RealServer, running_server

MODEL = "paxkv-demo"
# Five times as many as the engine runs at once. Some streams have the same prompt.
NUM_STREAMS = 40
MAX_BODY_BYTES = 100_000
LONG_ANSWER = 400
GREEDY = SamplingParams(temperature=0.0, max_tokens=48)


@pytest.fixture(scope="module")
def server():
    with running_server("--max-body-bytes", str(MAX_BODY_BYTES)) as running:
        yield running


@pytest.fixture(scope="module")
def offline_answers(demo_llm: LLM) -> list[str]:
    outputs = demo_llm.chat(demo_conversations(NUM_STREAMS), GREEDY, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def metric(server: RealServer, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=60).raise_for_status().text
    return float(re.search(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.M).group(1))


async def stream_answer(client: openai.AsyncOpenAI, messages, *, max_chunks=None, **extra) -> str:
    """The streamed answer; with `max_chunks` the client hangs up after that many."""
    stream = await client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, stream=True, **extra
    )
    parts = []
    async for chunk in stream:
        parts.append(chunk.choices[0].delta.content or "")
        if max_chunks is not None and len(parts) >= max_chunks:
            await stream.close()
            break
    return "".join(parts)


def test_demo_model_adds_offline(offline_answers: list[str]) -> None:
    sums = [a for i, a in enumerate(offline_answers) if i % 8 != 7]
    assert sum(map(sum_is_right, sums)) >= 0.95 * len(sums)


def test_concurrent_streams_equal_the_offline_answers(server, offline_answers) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            return await asyncio.gather(
                *(
                    stream_answer(client, messages, max_tokens=48)
                    for messages in demo_conversations(NUM_STREAMS)
                )
            )

    assert asyncio.run(run()) == offline_answers
    assert metric(server, "vllm:prefix_cache_hits_total") > 0
    assert metric(server, "paxkv_compiles_after_ready_total") == 0


def test_grammars_and_forced_calls_hold_while_other_requests_run(server) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    named = {"type": "function", "function": {"name": "f"}}
    question = [{"role": "user", "content": "What is 2 + 2?"}]
    yes_no = {"structured_outputs": {"regex": "(yes|no)( yes| no){3}"}}

    async def run(client: openai.AsyncOpenAI) -> list[object]:
        asked = {"model": MODEL, "messages": question, "max_tokens": 200}
        create = client.chat.completions.create
        return await asyncio.gather(
            create(**asked, n=3, seed=1, presence_penalty=1.5, extra_body=yes_no),
            create(**asked, tools=[tool], tool_choice=named, temperature=0),
            create(**asked, temperature=0),
            *(stream_answer(client, question, seed=1, extra_body=yes_no) for _ in range(4)),
        )

    async def main() -> list[object]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            return await run(client)

    bound, called, free, *streamed = asyncio.run(main())
    form = re.compile("(yes|no)( yes| no){3}")
    assert all(form.fullmatch(choice.message.content) for choice in bound.choices)
    (call,) = called.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["a"] in (1, 2)
    assert not form.fullmatch(free.choices[0].message.content)
    assert all(map(form.fullmatch, streamed))
    body = {"prompt": "a", "structured_outputs": {"regex": "(a"}}
    refused = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert refused.status_code == 400 and "unclosed group" in refused.text
    assert metric(server, "paxkv_compiles_after_ready_total") == 0


def test_killing_half_of_the_clients_leaves_no_block_behind(server, offline_answers) -> None:
    conversations = demo_conversations(NUM_STREAMS)
    steps_before = metric(server, "paxkv:steps_total")

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            # Every second client asks for a long answer and hangs up in the middle of it.
            return await asyncio.gather(
                *(
                    stream_answer(client, messages, max_tokens=48)
                    if index % 2
                    else stream_answer(
                        client,
                        messages,
                        max_chunks=5,
                        max_tokens=LONG_ANSWER,
                        extra_body={"ignore_eos": True},
                    )
                    for index, messages in enumerate(conversations)
                )
            )

    answers = asyncio.run(run())
    assert answers[1::2] == offline_answers[1::2]
    deadline = time.monotonic() + 120
    while metric(server, "vllm:num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert metric(server, "vllm:num_requests_running") == 0
    assert metric(server, "vllm:num_requests_waiting") == 0
    assert metric(server, "vllm:kv_cache_usage_perc") == 0
    # A request that is not aborted would have run for one step per token.
    assert metric(server, "paxkv:steps_total") - steps_before < LONG_ANSWER


def test_n_choices_equal_separate_requests_whole_and_streamed(server) -> None:
    def complete(**fields: object):
        return client.completions.create(
            model=MODEL, prompt=["The block", "A request"], max_tokens=20, **fields
        )

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        # Choice 3 * p + i is completion i of prompt p, and is drawn with the seed 7 + i.
        alone = [complete(seed=7 + i).choices for i in range(3)]
        wanted = [alone[i][p].text for p in range(2) for i in range(3)]
        whole = complete(n=3, seed=7)
        assert [choice.index for choice in whole.choices] == list(range(6))
        assert [choice.text for choice in whole.choices] == wanted
        texts = [""] * 6
        num_ends = [0] * 6
        for chunk in complete(n=3, seed=7, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                num_ends[choice.index] += choice.finish_reason is not None
        assert (texts, num_ends) == (wanted, [1] * 6)
    assert metric(server, "vllm:kv_cache_usage_perc") == 0
    assert metric(server, "paxkv_compiles_after_ready_total") == 0


def test_beam_search_finds_the_right_sum_first(server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "What is 23 + 58?"}],
            n=4,
            max_tokens=20,
            extra_body={"use_beam_search": True},
        )
    contents = [choice.message.content for choice in answer.choices]
    assert contents[0] == "23 + 58 = 81"
    assert len(set(contents)) == 4
    assert metric(server, "vllm:kv_cache_usage_perc") == 0
    assert metric(server, "paxkv_compiles_after_ready_total") == 0


def post(server: RealServer, content: bytes) -> httpx.Response:
    headers = {"Content-Type": "application/json"}
    return httpx.post(f"{server.url}/v1/completions", content=content, headers=headers, timeout=60)


def body(**fields: object) -> bytes:
    return json.dumps({"model": MODEL, "prompt": "What is 2 + 2?"} | fields).encode()


@pytest.mark.parametrize(
    ("content", "status", "word"),
    [
        (b'{"model": ', 400, "JSON"),
        (body(model="gpt-17"), 404, "gpt-17"),
        (body(prompt=""), 400, "empty"),
        (body(prompt=[]), 400, "prompt"),
        (body(prompt="7 " * 2000), 400, "1024"),
        (body(prompt=[5, 768]), 400, "768"),
        (body(prompt=[-1]), 400, "-1"),
        (body(temperature=-1), 400, "temperature"),
        (body(top_p=17), 400, "top_p"),
        (body(max_tokens=-3), 400, "max_tokens"),
        (body(max_tokens=10**30), 400, "max_tokens"),
        (body(temperature="warm"), 400, "temperature"),
        (body(stop=[[1]]), 400, "stop"),
        (body(n=129), 400, "[1, 128]"),
        (body(n=11, use_beam_search=True), 400, "[1, 10]"),
        (b"[1, 2]", 400, ""),
        (body(prompt="x" * MAX_BODY_BYTES), 413, str(MAX_BODY_BYTES)),
    ],
)
def test_bad_input_is_refused_and_the_server_continues(server, content, status, word) -> None:
    response = post(server, content)
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert word in error["message"]
    assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("completions", {"prompt": "ab " * 10_000}),
        ("chat/completions", {"messages": [{"role": "user", "content": "ab " * 10_000}]}),
        ("responses", {"input": "ab " * 10_000}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_gets_openais_error(server, path, fields, stream) -> None:
    body = fields | {"stream": stream}
    response = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=60)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert re.search(r"maximum context length is \d+ tokens", error["message"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_gets_anthropics_error(server, stream) -> None:
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": "ab " * 10_000}]}
    url = f"{server.url}/v1/messages"
    response = httpx.post(url, json=body | {"stream": stream}, timeout=60)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    # Clients read both numbers.
    found = re.match(r"prompt is too long[^0-9]*(\d+) tokens > (\d+) maximum", error["message"])
    assert found is not None and int(found[1]) > int(found[2])
    counted = httpx.post(f"{url}/count_tokens", json=body, timeout=60).raise_for_status()
    assert counted.json()["input_tokens"] >= int(found[1])
