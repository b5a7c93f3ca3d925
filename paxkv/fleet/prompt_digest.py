"""Digests of prompts, by which replicas with cached prefixes are found."""

from array import array

import msgspec
import xxhash

from paxkv.contracts.engine_request import EngineRequest

# Tokens per chunk: fewer than in most blocks, so that short beginnings distinguish prompts too.
CHUNK_TOKENS = 16
# Four bytes per token id. A token of English text has about four bytes too.
_CHUNK_BYTES = CHUNK_TOKENS * array("i").itemsize
# The fields of request bodies that become the prompt, in the usual order of chat templates.
_PROMPT_FIELDS = ("system", "instructions", "tools", "prompt", "messages", "input")


def digest_chain(root: bytes, data: bytes) -> list[int]:
    """Hashes each whole chunk of `data` together with all chunks before it and with `root`.

    The hashes are equal in all processes and on all machines. A client can construct collisions;
    they only send its requests to a replica without the prefix.
    """
    digest = xxhash.xxh3_64_intdigest
    parent = digest(root)
    chain: list[int] = []
    for end in range(_CHUNK_BYTES, len(data) + 1, _CHUNK_BYTES):
        parent = digest(data[end - _CHUNK_BYTES : end], parent)
        chain.append(parent)
    return chain


def prompt_chain(request: EngineRequest) -> list[int]:
    """The chain of a tokenized prompt.

    Two requests have equal hashes as far as they can share blocks. Exception: if their images or
    other multimodal items differ, all hashes differ, although text before an item can be shared.
    """
    items = [feature.identifier for feature in request.mm_features]
    root = repr((request.cache_salt, request.lora_name, items)).encode()
    return digest_chain(root, array("i", request.prompt_token_ids).tobytes())


def body_chain(body: bytes) -> list[int]:
    """The chain of a request body's prompt, without its tokenizer and chat template.

    The bodies of completions, chats, Anthropic's messages and OpenAI's responses are known. Of
    several prompts, the first counts. Equal beginnings of bodies give equal beginnings of prompts
    with nearly all chat templates, so the chain is good enough to choose a replica.

    Returns:
        [] for a body that is no JSON object or has no prompt.
    """
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return []
    if not isinstance(fields, dict):
        return []
    root = msgspec.json.encode([fields.get("cache_salt"), fields.get("model")])
    parts = [_prompt_bytes(fields[name]) for name in _PROMPT_FIELDS if fields.get(name)]
    return digest_chain(root, b"".join(parts))


def _prompt_bytes(value: object) -> bytes:
    if isinstance(value, list) and isinstance(value[0], str | list):
        value = value[0] or ""
    if isinstance(value, list) and isinstance(value[0], int):
        return _token_bytes(value)
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, list):
        return b"".join(map(msgspec.json.encode, value))
    return msgspec.json.encode(value)


def _token_bytes(token_ids: list[object]) -> bytes:
    try:
        return array("i", token_ids).tobytes()
    except (TypeError, OverflowError):
        # The engine's checks reject such a prompt.
        return b""
