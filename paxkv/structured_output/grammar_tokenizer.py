"""The tokenizer as llguidance needs it: the bytes of each token, and how a text is spelled."""

import json
from collections.abc import Sequence

import llguidance
import tokenizers


def make_grammar_tokenizer(
    tokenizer_json: str, *, vocab_size: int, eos_token_ids: Sequence[int]
) -> llguidance.LLTokenizer:
    """Takes a second or two with a large vocabulary.

    Raises:
        ValueError: Its tokens have no bytes, or there are more of them than `vocab_size`.
    """
    spelling = _Spelling(tokenizer_json, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
    eos_token = list(eos_token_ids)
    return llguidance.LLTokenizer(spelling, n_vocab=vocab_size, eos_token=eos_token)


class _Spelling:
    """What llguidance asks of a tokenizer that it is handed; the names are its own.

    By itself it has two things otherwise. To it no added token is text, be it special or not:
    "<tool_call>" could only be written as "<", "tool" and so on. And it takes what the tokenizer
    makes of a settled text as it comes: where that is other text (the normal form of "e" and an
    accent is one character), or the token of another meaning ("</s>" as the end of an answer), the
    request would end with an error.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self, tokenizer_json: str, *, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        tokenizer_json = _without_prefix(tokenizer_json)
        self._plain = llguidance.LLTokenizer(tokenizer_json, n_vocab=vocab_size, slices=[])
        self._backend = tokenizers.Tokenizer.from_str(tokenizer_json)
        # Their names in a text are text.
        self._backend.encode_special_tokens = True
        added = self._backend.get_added_tokens_decoder()
        self.eos_token_id = eos_token_ids[0]
        special_ids = {token_id for token_id, token in added.items() if token.special}
        self._special_ids = special_ids.union(eos_token_ids)
        self.special_token_ids = list(self._special_ids)
        self.tokens = [self._token_bytes(token_id) for token_id in range(vocab_size)]
        for token_id in added.keys() - self._special_ids:
            self.tokens[token_id] = self._added_bytes(added[token_id].content)

    def __call__(self, text: str) -> list[int]:
        token_ids = self._backend.encode(text, add_special_tokens=False).ids
        is_same = b"".join(self.tokens[i] for i in token_ids) == text.encode()
        if is_same and self._special_ids.isdisjoint(token_ids):
            return token_ids
        return self._plain.greedy_tokenize(text)

    def _token_bytes(self, token_id: int) -> bytes:
        text = self._plain.decode_bytes([token_id])
        # So it writes those that have none.
        return b"" if text == f"<[{token_id}]>".encode() else text

    def _added_bytes(self, content: str) -> bytes:
        # Behind another one, as some decoders drop the space that a text begins with.
        return self._backend.decoder.decode(["x", content])[1:].encode()


def _without_prefix(tokenizer_json: str) -> str:
    """The same tokenizer, which puts no space in front: what it spells goes on after other text."""
    content = json.loads(tokenizer_json)
    for part in ("normalizer", "pre_tokenizer"):
        content[part] = _step_without_prefix(content.get(part))
    return json.dumps(content)


def _step_without_prefix(step: dict[str, object] | None) -> dict[str, object] | None:
    match None if step is None else step["type"]:
        case None | "Prepend":
            return None
        case "Sequence":
            name = "normalizers" if "normalizers" in step else "pretokenizers"
            kept = [part for part in map(_step_without_prefix, step[name]) if part is not None]
            return step | {name: kept}
        case "Metaspace":
            return step | {"prepend_scheme": "never"}
        case "ByteLevel":
            return step | {"add_prefix_space": False}
    return step
