"""Bounds the text length per token, so that too long prompts are rejected without encoding."""

import json

import tokenizers
from tokenizers import models, pre_tokenizers

_BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))
# Normalizers that keep all text, with the largest factor by which they shorten it. NFC composes at
# most four characters into one (for example U+1F82).
_NORMALIZER_FACTORS = {"NFC": 4, "Prepend": 1}
_PRE_TOKENIZERS = frozenset({"ByteLevel", "Metaspace", "Digits"})
_SPLITTING_PRE_TOKENIZERS = frozenset({"Split", "Punctuation"})


def find_max_chars_per_token(backend: tokenizers.Tokenizer) -> int | None:
    """Largest number of characters of a text that can become one token.

    Returns:
        None if there is no bound: the tokenizer drops some text, such as unknown words or the space
        around a special token, or it is of an unknown kind.
    """
    steps = _read_steps(backend.pre_tokenizer, "pretokenizers")
    vocab = backend.get_vocab(with_added_tokens=False)
    if not all(map(_keeps_all_text, steps)) or not _knows_all_text(backend.model, vocab, steps):
        return None
    added_tokens = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added_tokens):
        return None
    factor = 1
    for step in _read_steps(backend.normalizer, "normalizers"):
        step_factor = _shortening_factor(step)
        if step_factor is None:
            return None
        factor *= step_factor
    # A name is at least as long as its token's text: byte-level names have a character per byte.
    names = [*vocab, *(token.content for token in added_tokens)]
    if backend.normalizer is not None:
        # Tokens with `normalized` match their normalized form in the text: " x" matches "▁▁x".
        normalized = [token.content for token in added_tokens if token.normalized]
        names += map(backend.normalizer.normalize_str, normalized)
    return factor * max(map(len, names), default=1)


def _read_steps(step: object | None, children: str) -> list[dict]:
    """The simple steps that a normalizer or pre-tokenizer consists of."""
    if step is None:
        return []
    found, waiting = [], [json.loads(step.__getstate__())]
    while waiting:
        content = waiting.pop(0)
        if content["type"] == "Sequence":
            waiting = content[children] + waiting
        else:
            found.append(content)
    return found


def _keeps_all_text(step: dict) -> bool:
    if step["type"] in _SPLITTING_PRE_TOKENIZERS:
        return step["behavior"] != "Removed"
    return step["type"] in _PRE_TOKENIZERS


def _knows_all_text(model: models.Model, vocab: dict[str, int], steps: list[dict]) -> bool:
    """Whether every character has tokens, possibly one for each of its bytes."""
    if not isinstance(model, models.BPE):
        return False
    # With these options, characters at the start or end of a word may lack a token.
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    if any(step["type"] == "ByteLevel" for step in steps):
        return vocab.keys() >= set(pre_tokenizers.ByteLevel.alphabet())
    return model.byte_fallback and vocab.keys() >= set(_BYTE_TOKENS)


def _shortening_factor(step: dict) -> int | None:
    if step["type"] == "Replace":
        text = step["pattern"].get("String")
        return 1 if text and len(step["content"]) >= len(text) else None
    return _NORMALIZER_FACTORS.get(step["type"])
