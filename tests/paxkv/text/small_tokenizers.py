"""Small tokenizers: byte-level, and SentencePiece with byte fallback."""

import itertools
from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from paxkv.text.tokenizer import Tokenizer

BOS, EOS = "<s>", "</s>"


def _byte_names() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary.

    Printable bytes stand for themselves.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = itertools.count(256)
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


_BYTE_NAMES = _byte_names()


def byte_chars(data: bytes) -> str:
    """The name of these bytes in a byte-level vocabulary."""
    return "".join(_BYTE_NAMES[byte] for byte in data)


def byte_level_backend(pieces: Iterable[bytes] = ()) -> tokenizers.Tokenizer:
    """Token `b` is the byte `b`; from 256 on `pieces`, in order, then BOS and EOS."""
    words = [bytes([byte]) for byte in range(256)]
    words += [piece for piece in dict.fromkeys(pieces) if len(piece) > 1]
    vocab = {byte_chars(word): token_id for token_id, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([BOS, EOS])
    return backend


def byte_level_tokenizer(pieces: Iterable[bytes] = ()) -> Tokenizer:
    return Tokenizer(byte_level_backend(pieces), {"bos_token": BOS, "eos_token": EOS})


def sentencepiece_tokenizer() -> Tokenizer:
    """Like Llama 2's: "▁" is a space, the first space is dropped, rare characters are bytes."""
    words = ["<unk>", BOS, EOS, *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "▁red", "▁green", "▁blue", "berry", "s", "."]
    vocab = {word: token_id for token_id, word in enumerate(words)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", BOS, EOS])
    return Tokenizer(backend, {"bos_token": BOS, "eos_token": EOS})
