"""Chats with a server of a model with states find the prefixes of earlier chats.

Two to five minutes: pytest -m slow tests/end_to_end/test_state_hits_served.py
"""

import dataclasses
import itertools
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from paxkv.trace.calls import ScheduleCall
from paxkv.trace.trace_file import TraceReader
from tests.end_to_end.parity import make_checkpoint
from tests.end_to_end.real_server import running_server
from tests.small_engine import CHECKPOINT

pytestmark = pytest.mark.slow

FAMILIES = ("qwen3-next", "bamba", "kimi-linear", "jamba")
BLOCK_SIZE, NUM_CHATS = 16, 32
FLAGS = (
    *("--block-size", str(BLOCK_SIZE), "--max-num-seqs", "8"),
    *("--max-num-batched-tokens", "512", "--served-model-name", "model", "--enable-admin"),
)
# Tokens that are a space and a word. The tokenizer cuts a text of them into the same tokens again.
_VOCAB = json.loads((CHECKPOINT / "tokenizer.json").read_text())["model"]["vocab"]
WORDS = {f" {name[1:]}": i for name, i in _VOCAB.items() if name[0] == "Ġ" and name[1:].isalpha()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    num_cached: int
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chats:
    """A client of a server, whose trace lists the steps."""

    url: str
    trace_file: Path
    attention_kind: str  # of the layers that have no state

    def send(self, messages: list[dict[str, str]], salt: str, num_tokens: int = 2) -> Answer:
        body = {
            "model": "model",
            "messages": messages,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "allowed_token_ids": list(WORDS.values()),
            "return_token_ids": True,
            "cache_salt": salt,
        }
        response = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=120)
        answer = response.raise_for_status().json()
        (choice,) = answer["choices"]
        assert len(choice["token_ids"]) == num_tokens
        return Answer(
            request_id=response.headers["x-request-id"],
            prompt_token_ids=answer["prompt_token_ids"],
            token_ids=choice["token_ids"],
            num_cached=answer["usage"]["prompt_tokens_details"]["cached_tokens"],
            text=choice["message"]["content"],
        )

    def why_missed(self, answer: Answer) -> tuple[str, str]:
        """The reason that the server gives, and the kind of layers that missed."""
        response = httpx.get(
            f"{self.url}/explain_prefix_cache_miss", params={"request_id": answer.request_id}
        )
        (miss,) = response.raise_for_status().json()["prompts"]
        return miss["reason"], miss["kind"]

    def hits_by_step(self) -> list[list[int]]:
        """Cached tokens of the requests that a step admitted, for each step that admitted any."""
        return [
            [row.num_computed_tokens for row in call.decision.new]
            for line in TraceReader.open(self.trace_file).lines()
            for call in line.calls
            if isinstance(call, ScheduleCall) and call.decision is not None and call.decision.new
        ]


@pytest.fixture(scope="module", params=FAMILIES)
def chats(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Chats]:
    folder = tmp_path_factory.mktemp(request.param)
    make_checkpoint(request.param, folder, 1, is_shallow=True, is_sharp=True)
    trace_file = folder / "trace.jsonl"
    arguments = ("--model", str(folder), "--trace-file", str(trace_file))
    with running_server(*arguments, *FLAGS) as server:
        kind = "mla_attention" if request.param == "kimi-linear" else "full_attention"
        yield Chats(url=server.url, trace_file=trace_file, attention_kind=kind)


def make_text(rng: random.Random, num_tokens: int) -> str:
    return "".join(rng.choices(list(WORDS), k=num_tokens))


def make_messages(num_shared: int, seed: str) -> list[list[dict[str, str]]]:
    """Chats with one system message, and user messages of 5 to 200 tokens."""
    rng = random.Random(seed)
    system = {"role": "system", "content": make_text(rng, num_shared)}
    return [
        [system, {"role": "user", "content": make_text(rng, rng.randint(5, 200))}]
        for _ in range(NUM_CHATS)
    ]


def num_common(answers: list[Answer]) -> int:
    """Tokens that all prompts begin with."""
    columns = zip(*(answer.prompt_token_ids for answer in answers), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))


def misses(answers: list[Answer]) -> list[Answer]:
    """The answers whose prompts lack a full block of the common beginning."""
    wanted = num_common(answers) // BLOCK_SIZE * BLOCK_SIZE
    return [answer for answer in answers if answer.num_cached < wanted]


@pytest.mark.parametrize("num_shared", [300, 400])
def test_all_chats_but_the_first_hit(chats: Chats, num_shared: int) -> None:
    salt = f"one after another {num_shared}"
    answers = [chats.send(messages, salt) for messages in make_messages(num_shared, salt)]
    assert num_common(answers) >= num_shared
    assert misses(answers) == answers[:1]
    assert chats.why_missed(answers[0]) == ("first_block_differs", chats.attention_kind)


def test_chats_sent_at_once_hit_from_the_third_step_on(chats: Chats) -> None:
    num_before = len(chats.hits_by_step())
    messages = make_messages(300, "at once")
    with ThreadPoolExecutor(NUM_CHATS) as pool:
        answers = list(pool.map(lambda one: chats.send(one, "at once"), messages))
    steps = chats.hits_by_step()[num_before:]
    assert sum(map(len, steps)) == NUM_CHATS
    wanted = num_common(answers) // BLOCK_SIZE * BLOCK_SIZE
    late = [num_cached for step in steps[2:] for num_cached in step]
    assert min(late) >= wanted
    missed = misses(answers)
    print(f"{len(missed)} of {NUM_CHATS} missed; hits of admitted requests by step: {steps}")
    assert 1 <= len(missed) <= len(steps[0]) + len(steps[1])
    # A request that started one step too early found the first one's keys and values, but no state.
    reasons = {chats.why_missed(answer) for answer in missed}
    assert reasons <= {("first_block_differs", chats.attention_kind), ("state_not_saved", "state")}


@pytest.mark.parametrize("num_answered", [3, BLOCK_SIZE - 1, BLOCK_SIZE, 200])
def test_turns_of_a_chat_recompute_at_most_a_block_of_the_earlier_ones(
    chats: Chats, num_answered: int
) -> None:
    salt = f"turns with {num_answered} tokens"
    rng = random.Random(salt)
    messages: list[dict[str, str]] = []
    known: list[int] = []
    for num_tokens in (*[num_answered] * 4, 3):
        messages.append({"role": "user", "content": make_text(rng, 5)})
        answer = chats.send(messages, salt, num_tokens)
        assert answer.prompt_token_ids[: len(known)] == known
        assert answer.num_cached >= len(known) - BLOCK_SIZE
        # The rest is new. If a state were missing, the reason would be "state_not_saved".
        reason, _ = chats.why_missed(answer)
        assert reason in ("too_short", "first_block_differs", "block_differs")
        messages.append({"role": "assistant", "content": answer.text})
        known = answer.prompt_token_ids + answer.token_ids
