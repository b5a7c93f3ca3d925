"""Digests of prompts: what they distinguish, and that all processes compute the same."""

import dataclasses
import json
import subprocess
import sys

import pytest

from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.engine_request import EngineRequest, MultiModalFeature
from paxkv.fleet.prompt_digest import body_chain, prompt_chain

CHUNK = 16


def request(token_ids: list[int], **settings: object) -> EngineRequest:
    settings = {"sampling_params": SamplingParams()} | settings
    return EngineRequest(request_id="r", prompt_token_ids=token_ids, **settings)


def test_requests_that_cannot_share_blocks_have_different_hashes() -> None:
    token_ids = [5] * CHUNK * 2
    image = MultiModalFeature(identifier="cat", offset=0, length=4)
    requests = [
        request(token_ids),
        request(token_ids, cache_salt="tenant"),
        request(token_ids, lora_name="tenant"),
        request(token_ids, mm_features=(image,)),
        request(token_ids, mm_features=(dataclasses.replace(image, identifier="dog"),)),
    ]
    chains = [prompt_chain(request) for request in requests]
    assert len({chunk for chain in chains for chunk in chain}) == 2 * len(requests)


def test_digests_are_the_same_in_another_process() -> None:
    chain = body_chain(b'{"prompt": "' + b"ab" * 100 + b'"}')
    program = (
        "from paxkv.fleet.prompt_digest import body_chain\n"
        "print(body_chain(b'{\"prompt\": \"' + b'ab' * 100 + b'\"}'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(done.stdout) == chain != []


def chain_of(**fields: object) -> list[int]:
    return body_chain(json.dumps(fields).encode())


def num_common(a: list[int], b: list[int]) -> int:
    equal = [x == y for x, y in zip(a, b, strict=False)]
    return (equal + [False]).index(False)


SYSTEM = {"role": "system", "content": "You are an assistant that answers briefly. " * 4}
QUESTION = {"role": "user", "content": "What is a prefix cache? " * 10}
ANSWER = {"role": "assistant", "content": "A cache of prefixes. " * 5}


def test_chat_shares_chunks_with_its_next_turn_and_with_its_system_prompt() -> None:
    turn = chain_of(messages=[SYSTEM, QUESTION], temperature=0.5)
    next_turn = chain_of(messages=[SYSTEM, QUESTION, ANSWER], temperature=1.0, stream=True)
    # The end of a turn lies in a chunk with the beginning of the next.
    assert num_common(turn, next_turn) == len(turn) > 5
    other = chain_of(messages=[SYSTEM, ANSWER])
    assert 2 <= num_common(turn, other) < len(other)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [5] * 64},
        {"prompt": "word " * 60},
        {"prompt": ["word " * 60, "other"]},
        {"prompt": [[5] * 64, [6]]},
        {"system": "word " * 60, "messages": [QUESTION]},
        {"instructions": "word " * 60, "input": "question"},
        {"input": [QUESTION]},
        {"tools": [{"type": "function", "function": {"name": "f" * 100}}], "messages": [QUESTION]},
    ],
)
def test_prompt_of_each_api_has_a_chain_that_depends_on_the_salt(fields: dict) -> None:
    chain = chain_of(**fields)
    assert len(chain) >= 3
    assert num_common(chain, chain_of(**fields, cache_salt="tenant")) == 0


@pytest.mark.parametrize(
    "body",
    [b"", b"[1]", b"{", b"\xff", b"null", b'{"prompt": []}', b'{"prompt": [1.5]}']
    + [b'{"prompt": [99999999999]}', b'{"messages": {}}', b"[" * 100_000, b'{"prompt": [[]]}'],
)
def test_body_without_a_usable_prompt_has_no_chain(body: bytes) -> None:
    assert body_chain(body) == []
