"""The tokenizer for llguidance: the bytes of each token, and the tokens of a text.

A tokenizer may have more tokens than its model (Gemma 3 1B has one more, for images), and a model
may have more rows than its tokenizer has tokens. Tokens past the model's vocabulary are removed:
the model can never generate them. Rows without a token have no bytes, so no grammar allows them.
"""

import json
from collections.abc import Mapping, Sequence

import llguidance
import tokenizers

from paxkv.structured_output.token_texts import text_of_token

_TEXT_STEPS = ("normalizer", "pre_tokenizer")


def make_grammar_tokenizer(
    tokenizer_json: str, *, vocab_size: int, eos_token_ids: Sequence[int]
) -> llguidance.LLTokenizer:
    """Makes the tokenizer, which takes a second or two with a large vocabulary.

    Args:
        vocab_size: The model's number of tokens. The tokenizer may have fewer or more.
        eos_token_ids: In `[0, vocab_size)`.

    Raises:
        ValueError: The tokens have no bytes.
    """
    spelling = _Spelling(tokenizer_json, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
    eos_token = list(eos_token_ids)
    return llguidance.LLTokenizer(spelling, n_vocab=vocab_size, eos_token=eos_token)


class _Spelling:
    """The interface that llguidance requires of a tokenizer, with llguidance's names.

    It replaces llguidance's own tokenizer for two reasons. llguidance's treats no added token as
    text, even if the token is not special: "<tool_call>" could only be written as "<", "tool" and
    so on. It also does not check the tokens of a text that must follow. They may spell another text
    ("e" and an accent are normalized to one character), or mean something else ("</s>" ends an
    answer). Then the request would end with an error.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self, tokenizer_json: str, *, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        content = _without_prefix(json.loads(tokenizer_json))
        tokenizer_json = json.dumps(_without_tokens_from(vocab_size, content))
        self._plain = llguidance.LLTokenizer(tokenizer_json, n_vocab=vocab_size, slices=[])
        self._backend = tokenizers.Tokenizer.from_str(tokenizer_json)
        # The names of special tokens in a text are only text.
        self._backend.encode_special_tokens = True
        added = self._backend.get_added_tokens_decoder()
        self.eos_token_id = eos_token_ids[0]
        special_ids = {token_id for token_id, token in added.items() if token.special}
        self._special_ids = special_ids.union(eos_token_ids)
        self.special_token_ids = list(self._special_ids)
        self.tokens = [text_of_token(self._plain, token_id) for token_id in range(vocab_size)]
        for token_id in added.keys() - self._special_ids:
            self.tokens[token_id] = self._added_bytes(added[token_id].content)

    def __call__(self, text: str) -> list[int]:
        token_ids = self._backend.encode(text, add_special_tokens=False).ids
        is_same = b"".join(self.tokens[i] for i in token_ids) == text.encode()
        if is_same and self._special_ids.isdisjoint(token_ids):
            return token_ids
        return self._plain.greedy_tokenize(text)

    def _added_bytes(self, content: str) -> bytes:
        # After another token, because some decoders drop a space at the beginning of a text.
        return self._backend.decoder.decode(["x", content])[1:].encode()


def _without_prefix(content: dict[str, object]) -> dict[str, object]:
    """The same tokenizer without a space before texts, because its texts follow other text."""
    steps = {name: _step_without_prefix(content.get(name)) for name in _TEXT_STEPS}
    return content | steps


def _without_tokens_from(num_tokens: int, content: dict[str, object]) -> dict[str, object]:
    """The same tokenizer without the tokens whose ids are `num_tokens` or more."""
    added = [token for token in content.get("added_tokens") or () if token["id"] < num_tokens]
    model = content["model"]
    vocab = model.get("vocab")
    if isinstance(vocab, list):  # Unigram: a token's id is its index
        model = model | {"vocab": vocab[:num_tokens]}
    elif isinstance(vocab, dict) and any(token_id >= num_tokens for token_id in vocab.values()):
        kept = {name: token_id for name, token_id in vocab.items() if token_id < num_tokens}
        model = model | {"vocab": kept}
        if "merges" in model:
            model["merges"] = [merge for merge in model["merges"] if _is_known(merge, kept)]
    return content | {"added_tokens": added, "model": model}


def _is_known(merge: str | list[str], vocab: Mapping[str, int]) -> bool:
    """Whether both parts of a merge and its result are tokens: "a b" or ["a", "b"] -> "ab"."""
    first, second = merge.split(" ") if isinstance(merge, str) else merge
    return first in vocab and second in vocab and first + second in vocab


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
