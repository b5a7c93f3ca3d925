"""Makes tokenizer.json and a chat template from tekken.json, the tokenizer of Mistral's files.

The package `mistral-common` checks the file, lists its tokens, and generates the chat template.
"""

import importlib
import json
import types
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from models.errors import CheckpointError, ModelError, UnsupportedModelError
from models.loading.tokenizer_folder import write_tokenizer_folder

TEKKEN_FILE = "tekken.json"
_BOS, _EOS = "<s>", "</s>"
# A byte-level tokenizer writes each of these bytes as the character with the byte's number. It
# writes the other bytes as characters from 256 on.
_PRINTABLE = {*range(33, 127), *range(161, 173), *range(174, 256)}


def write_tokenizer_of_tekken(path: Path, cache: Path | None) -> Path:
    """Writes the tokenizer of a tekken.json and its chat template into a folder of the cache.

    Args:
        cache: As in `write_tokenizer_folder`.

    Returns:
        The folder.

    Raises:
        ModelError: The package `mistral-common` is not installed.
        CheckpointError: The file is malformed.
        UnsupportedModelError: A special token has the text of another token.
    """
    tekken = _import("mistral_common.tokens.tokenizers.tekken", path)
    generator = _import("mistral_common.integrations.chat_templates.chat_templates", path)
    try:
        tokenizer = tekken.Tekkenizer.from_file(path)
        pattern = json.loads(path.read_bytes())["config"]["pattern"]
        template = generator.convert_tokenizer_to_chat_template(path)
    # The library checks files by `assert`, and raises errors of several other kinds.
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read by mistral-common ({type(error).__name__}: {error}). Download "
            "it again, update mistral-common, or name another tokenizer with --tokenizer."
        ) from error
    num_special = tokenizer.num_special_tokens
    special = [tokenizer.id_to_piece(token_id) for token_id in range(num_special)]
    stored = [tokenizer.id_to_byte_piece(idx) for idx in range(num_special, tokenizer.n_words)]
    ids = {text: token_id for token_id, text in enumerate([*special, *map(_as_text, stored)])}
    if len(ids) < tokenizer.n_words:
        raise UnsupportedModelError(
            f"{path}: a special token has the text of another token. Name another tokenizer with "
            "--tokenizer."
        )
    # If a piece is itself a token, the library applies no merges to it.
    backend = tokenizers.Tokenizer(models.BPE(ids, _merges_of(stored), ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [tokenizers.AddedToken(text, special=True, normalized=False) for text in special]
    )
    config = {
        "bos_token": _BOS,
        "eos_token": _EOS,
        "add_bos_token": True,
        "add_eos_token": False,
        "chat_template": template,
    }
    return write_tokenizer_folder(backend, config, cache)


def _import(name: str, path: Path) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ModelError(
            f"{path} needs the package mistral-common ({error}). Install it: "
            "`pip install 'paxkv[mistral]'`, or name a folder with a tokenizer.json with "
            "--tokenizer."
        ) from error


def _as_text(token: bytes) -> str:
    """The characters that stand for the bytes of a token in tokenizer.json."""
    return "".join(map(_BYTE_TEXTS.__getitem__, token))


def _byte_texts() -> list[str]:
    others = iter(range(256, 512))
    return [chr(byte) if byte in _PRINTABLE else chr(next(others)) for byte in range(256)]


_BYTE_TEXTS = _byte_texts()


def _merges_of(tokens: list[bytes]) -> list[tuple[str, str]]:
    """All pairs of tokens that join to a token, ordered by this token's position in the list."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    merges = []
    for token in tokens:
        pairs = [
            (ranks[token[:cut]], ranks[token[cut:]], token[:cut], token[cut:])
            for cut in range(1, len(token))
            if token[:cut] in ranks and token[cut:] in ranks
        ]
        merges += [(_as_text(left), _as_text(right)) for _, _, left, right in sorted(pairs)]
    return merges
