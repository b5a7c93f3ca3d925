"""Makes tokenizer.json and tokenizer_config.json from the metadata of a GGUF file."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from models.loading.gguf.gguf_file import read_gguf
from models.loading.sentencepiece_backend import make_sentencepiece_backend
from models.loading.tokenizer_folder import write_tokenizer_folder

logger = logging.getLogger(__name__)

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# The file's `tokenizer.ggml.pre` -> the pattern of pieces that no token crosses.
_PATTERNS = {
    "llama-bpe": rf"{_WORDS}|\p{{N}}{{1,3}}|{_OTHERS}",
    "qwen2": rf"{_WORDS}|\p{{N}}|{_OTHERS}",
}
# In Llama 3, a piece that is itself a token becomes this token, without merges.
_WHOLE_PIECES = {"llama-bpe"}
_NFC = {"qwen2"}
# Values of `tokenizer.ggml.token_type`.
_CONTROL, _USER_DEFINED = 3, 4
_PRE = "tokenizer.ggml.pre"
_NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def write_tokenizer_of(path: Path, cache: Path | None) -> Path | None:
    """Writes the tokenizer of a GGUF file and its chat template into a folder of the cache.

    Args:
        path: The GGUF file.
        cache: As in `write_tokenizer_folder`.

    Returns:
        The folder. None if the file has no tokenizer or one that paxkv cannot read; the reason is
        in a warning.
    """
    metadata = read_gguf(path).metadata
    try:
        made = _make_backend(metadata)
        config = None if isinstance(made, str) else _tokenizer_config(metadata)
    # `tokenizers` raises plain exceptions, for example for a merge of a token that is not there.
    except Exception as error:
        made = f"its values contradict each other ({type(error).__name__}: {error})"
    if isinstance(made, str):
        logger.warning("the tokenizer of %s is not read: %s.", path, made)
        return None
    return write_tokenizer_folder(made, config, cache)


def _make_backend(metadata: Mapping[str, object]) -> tokenizers.Tokenizer | str:
    """The tokenizer, or the reason why there is none."""
    kind, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        return "the file has no tokenizer.ggml.tokens"
    if kind == "gpt2":
        return _make_byte_level(metadata, tokens)
    if kind == "llama":
        return _make_sentencepiece(metadata, tokens)
    return f"tokenizer.ggml.model is {kind!r}; paxkv reads 'gpt2' and 'llama'"


def _make_byte_level(
    metadata: Mapping[str, object], tokens: Sequence[str]
) -> tokenizers.Tokenizer | str:
    pre, merges = metadata.get(_PRE), metadata.get("tokenizer.ggml.merges")
    if pre not in _PATTERNS:
        known = ", ".join(map(repr, _PATTERNS))
        return f"tokenizer.ggml.pre is {pre!r}; paxkv reads {known}"
    if not isinstance(merges, list):
        return "the file has no tokenizer.ggml.merges"
    backend = tokenizers.Tokenizer(
        models.BPE(
            {token: idx for idx, token in enumerate(tokens)},
            [tuple(merge.split(" ")) for merge in merges],
            ignore_merges=pre in _WHOLE_PIECES,
        )
    )
    if pre in _NFC:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(_PATTERNS[pre]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _make_sentencepiece(
    metadata: Mapping[str, object], tokens: Sequence[str]
) -> tokenizers.Tokenizer | str:
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None:
        return "the file has no tokenizer.ggml.scores"
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    has_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    return make_sentencepiece_backend(
        tokens,
        scores,
        unknown_id=None if unknown is None else int(unknown),
        prefix="parts" if has_prefix else "none",
    )


def _tokenizer_config(metadata: Mapping[str, object]) -> dict[str, object]:
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type", ())
    config: dict[str, object] = {
        "added_tokens_decoder": {
            str(idx): {
                "content": tokens[idx],
                "special": bool(kind == _CONTROL),
                "normalized": False,
                "lstrip": False,
                "rstrip": False,
                "single_word": False,
            }
            for idx, kind in enumerate(types)
            if kind in (_CONTROL, _USER_DEFINED)
        }
    }
    for name, own_name in _NAMED.items():
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is not None:
            config[own_name] = tokens[int(token_id)]
    # The defaults of llama.cpp.
    has_bos = metadata.get("tokenizer.ggml.model") == "llama" or metadata.get(_PRE) == "llama-bpe"
    config["add_bos_token"] = bool(metadata.get("tokenizer.ggml.add_bos_token", has_bos))
    config["add_eos_token"] = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return config
