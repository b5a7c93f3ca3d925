"""Tokenizer files that paxkv makes itself."""

import os

import tokenizers

from models.loading.tokenizer_folder import write_tokenizer_folder


def test_files_have_the_mode_of_the_umask(tmp_path):
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
    old = os.umask(0o027)
    try:
        folder = write_tokenizer_folder(backend, {}, tmp_path)
    finally:
        os.umask(old)
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert modes == {"tokenizer.json": 0o640, "tokenizer_config.json": 0o640}
