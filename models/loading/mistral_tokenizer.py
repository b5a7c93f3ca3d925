"""Makes tokenizer.json and a chat template from a tokenizer of Mistral's own.

It is tekken.json, or a SentencePiece model such as tokenizer.model.v3. The package `mistral-common`
checks the file, lists its tokens, and generates the chat template.
"""

import importlib
import json
import re
import types
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from models.errors import CheckpointError, ModelError, UnsupportedModelError
from models.loading.mistral_files import PARAMS_FILE
from models.loading.sentencepiece_backend import make_sentencepiece_backend
from models.loading.tokenizer_folder import write_tokenizer_folder

_TEKKEN_FILE = "tekken.json"
_SENTENCEPIECE_FILE = re.compile(r"tokenizer\.model(?:\.v(\d+))?")
_BOS, _EOS = "<s>", "</s>"
# A byte-level tokenizer writes each of these bytes as the character with the byte's number. It
# writes the other bytes as characters from 256 on.
_PRINTABLE = {*range(33, 127), *range(161, 173), *range(174, 256)}
# Texts whose tokens show whether a SentencePiece model changes texts before it cuts them.
_PROBES = (
    " two  spaces ",
    "\n\tA\r\n b",
    "na\u00efve cafe\u0301 \ufb01 \uff21",
    "\u6771\u4eac \U0001f642 12345",
)


def find_mistral_tokenizer(folder: Path) -> Path | None:
    """tekken.json, otherwise the SentencePiece model of the newest version; None if there is none.

    tokenizer.model has no version. It counts only in a folder with params.json, because other
    models also have files of this name.
    """
    if (folder / _TEKKEN_FILE).is_file():
        return folder / _TEKKEN_FILE
    versions = {}
    for path in folder.glob("tokenizer.model*"):
        if found := _SENTENCEPIECE_FILE.fullmatch(path.name):
            versions[int(found[1] or 0)] = path
    if not (folder / PARAMS_FILE).is_file():
        versions.pop(0, None)
    return versions[max(versions)] if versions else None


def write_mistral_tokenizer(path: Path, cache: Path | None) -> Path:
    """Writes a tokenizer of Mistral's own and its chat template into a folder of the cache.

    Args:
        cache: As in `write_tokenizer_folder`.

    Returns:
        The folder.

    Raises:
        ModelError: The package `mistral-common` or `sentencepiece` is not installed.
        CheckpointError: The file is malformed.
        UnsupportedModelError: A special token of tekken.json has the text of another token, or a
            SentencePiece model gives other tokens than the tokenizer that was made from it.
    """
    generator = _import("mistral_common.integrations.chat_templates.chat_templates", path)
    make = _make_tekken if path.name == _TEKKEN_FILE else _make_sentencepiece
    backend, template = make(path, generator)
    config = {
        "bos_token": _BOS,
        "eos_token": _EOS,
        "add_bos_token": True,
        "add_eos_token": False,
        "chat_template": template,
    }
    return write_tokenizer_folder(backend, config, cache)


def _make_tekken(path: Path, generator: types.ModuleType) -> tuple[tokenizers.Tokenizer, str]:
    """The tokenizer and the chat template."""
    tekken = _import("mistral_common.tokens.tokenizers.tekken", path)
    try:
        tokenizer = tekken.Tekkenizer.from_file(path)
        pattern = json.loads(path.read_bytes())["config"]["pattern"]
        template = generator.convert_tokenizer_to_chat_template(path)
    # The library checks files by `assert`, and raises errors of several other kinds.
    except Exception as error:
        raise _cannot_read(path, error) from error
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
    _add_special(backend, special)
    return backend, template


def _make_sentencepiece(
    path: Path, generator: types.ModuleType
) -> tuple[tokenizers.Tokenizer, str]:
    """As `_make_tekken`."""
    sentencepiece = _import("sentencepiece", path)
    try:
        model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        template = generator.convert_tokenizer_to_chat_template(path)
    except Exception as error:
        raise _cannot_read(path, error) from error
    token_ids = range(model.vocab_size())
    backend = make_sentencepiece_backend(
        [model.id_to_piece(token_id) for token_id in token_ids],
        [model.get_score(token_id) for token_id in token_ids],
        unknown_id=model.unk_id(),
        prefix="start",
    )
    _add_special(
        backend,
        [model.id_to_piece(token_id) for token_id in token_ids if model.is_control(token_id)],
    )
    for text in _PROBES:
        if backend.encode(text, add_special_tokens=False).ids != model.encode(text):
            raise UnsupportedModelError(
                f"{path} is a SentencePiece model of another kind than Mistral's: its tokens of "
                f"{text!r} differ from paxkv's. Name another tokenizer with --tokenizer."
            )
    return backend, template


def _add_special(backend: tokenizers.Tokenizer, texts: Sequence[str]) -> None:
    backend.add_special_tokens(
        [tokenizers.AddedToken(text, special=True, normalized=False) for text in texts]
    )


def _cannot_read(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read by mistral-common ({type(error).__name__}: {error}). Download it "
        "again, update mistral-common, or name another tokenizer with --tokenizer."
    )


def _import(name: str, path: Path) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ModelError(
            f"{path} needs the packages mistral-common and sentencepiece ({error}). Install them: "
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
