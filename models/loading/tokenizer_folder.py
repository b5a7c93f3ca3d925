"""Writes tokenizer files that were made from a format without tokenizer.json."""

import hashlib
import json
import os
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path

import tokenizers


def write_tokenizer_folder(
    backend: tokenizers.Tokenizer, config: Mapping[str, object], cache: Path | None
) -> Path:
    """Writes tokenizer.json and tokenizer_config.json into a folder, and returns the folder.

    Args:
        config: The content of tokenizer_config.json, with the chat template.
        cache: The parent of the folder; it may not exist yet. The folder's name is a hash of the
            files. None: a new temporary folder that stays until a person or the system removes it.
    """
    files = {
        "tokenizer.json": backend.to_str(),
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False),
    }
    digest = hashlib.sha256("\0".join(files.values()).encode()).hexdigest()[:32]
    folder = Path(tempfile.mkdtemp(prefix="paxkv-")) if cache is None else cache / digest
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        # Another engine may be writing the same file. Unlike a file of `tempfile`, this one has the
        # mode that the umask gives, so that other users can share the cache.
        part = folder / f"{name}.{secrets.token_hex(8)}"
        part.write_text(text, encoding="utf-8")
        os.replace(part, folder / name)
    return folder
