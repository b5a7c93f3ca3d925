"""The backend of a tokenizer whose pieces and scores come from a SentencePiece model."""

from collections.abc import Mapping, Sequence
from typing import Literal

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

_SPACE = "\u2581"
# Which texts get a space in front: "parts" is each text between special tokens, "start" is only the
# start of the whole text.
Prefix = Literal["parts", "start", "none"]


def make_sentencepiece_backend(
    pieces: Sequence[str], scores: Sequence[float], *, unknown_id: int | None, prefix: Prefix
) -> tokenizers.Tokenizer:
    """A tokenizer that merges the pair of pieces with the highest score first.

    Args:
        unknown_id: Id of the piece that replaces unknown text; None if there is no such piece.
    """
    ids = {piece: idx for idx, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(
        models.BPE(
            ids,
            _merges_of(ids, scores),
            unk_token=None if unknown_id is None else pieces[unknown_id],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prepend = [normalizers.Prepend(_SPACE)] if prefix == "parts" else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", _SPACE)])
    if prefix == "start":
        # A `Metaspace` puts its character in front of a text unless the text starts with it. The
        # normalizer has replaced all spaces, so the first `Metaspace` always adds a space. The
        # second one replaces this space.
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Metaspace(" ", prepend_scheme="first", split=False),
                pre_tokenizers.Metaspace(_SPACE, prepend_scheme="never", split=False),
            ]
        )
    strip = [] if prefix == "none" else [decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges_of(ids: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """All pairs of pieces that join to a piece, ordered by this piece's score, highest first."""
    found = [
        (-float(scores[idx]), ids[piece[:cut]], ids[piece[cut:]], piece[:cut], piece[cut:])
        for piece, idx in ids.items()
        for cut in range(1, len(piece))
        if piece[:cut] in ids and piece[cut:] in ids
    ]
    return [(left, right) for *_, left, right in sorted(found)]
