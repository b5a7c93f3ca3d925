"""Turns conversations into token ids with a loss mask, and packs them into rows of one length."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from models.demo.data import Conversation
from models.demo.tokenizer_training import TURN_END, TURN_START


@dataclass(frozen=True, slots=True)
class EncodedConversation:
    """A conversation as the chat template and the tokenizer render it."""

    token_ids: list[int]
    # True where the token belongs to an answer (its <|im_end|> included): these are learned.
    is_answer: list[bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """Conversations laid one after another in rows; each sees only itself, from position 0."""

    token_ids: np.ndarray  # i32[num_rows, row_length]
    positions: np.ndarray  # i32[num_rows, row_length], restarts at 0 with each conversation
    segment_ids: np.ndarray  # i32[num_rows, row_length], 0 is padding
    is_answer: np.ndarray  # bool[num_rows, row_length]


def _pieces(conversation: Conversation) -> list[tuple[str, bool]]:
    """Cuts the rendered chat where the server does: what the model reads, and what it writes."""
    pieces = []
    read = ""
    if conversation.system is not None:
        read = f"{TURN_START}system\n{conversation.system}{TURN_END}\n"
    for turn in conversation.turns:
        read += f"{TURN_START}user\n{turn.question}{TURN_END}\n{TURN_START}assistant\n"
        pieces += [(read, False), (f"{turn.answer}{TURN_END}", True)]
        read = "\n"
    return pieces


def encode_conversations(
    tokenizer: Tokenizer, conversations: Sequence[Conversation]
) -> list[EncodedConversation]:
    """Encodes many conversations at once (one call into the tokenizer)."""
    pieces = [_pieces(conversation) for conversation in conversations]
    flat = tokenizer.encode_batch([text for one in pieces for text, _ in one])
    encodings = iter(flat)
    result = []
    for one in pieces:
        token_ids: list[int] = []
        is_answer: list[bool] = []
        for _, answer in one:
            ids = next(encodings).ids
            token_ids += ids
            is_answer += [answer] * len(ids)
        result.append(EncodedConversation(token_ids, is_answer))
    return result


def assign_rows(
    encoded: Sequence[EncodedConversation], *, row_length: int
) -> list[list[EncodedConversation]]:
    """Puts each conversation, in order, into the first row with room, opening rows as needed.

    Raises:
        ValueError: A conversation is longer than a row.
    """
    rows: list[list[EncodedConversation]] = []
    room: list[int] = []
    for one in encoded:
        length = len(one.token_ids)
        if length > row_length:
            raise ValueError(f"conversation does not fit: got {length=}, wanted <= {row_length=}")
        row_idx = next((i for i, free in enumerate(room) if free >= length), None)
        if row_idx is None:
            row_idx = len(rows)
            rows.append([])
            room.append(row_length)
        rows[row_idx].append(one)
        room[row_idx] -= length
    return rows


def pack(rows: Sequence[Sequence[EncodedConversation]], *, row_length: int) -> PackedRows:
    """Lays the conversations of each row one after another and pads the rest."""
    shape = (len(rows), row_length)
    packed = PackedRows(
        token_ids=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
        segment_ids=np.zeros(shape, np.int32),
        is_answer=np.zeros(shape, bool),
    )
    for row_idx, row in enumerate(rows):
        start = 0
        for segment_id, one in enumerate(row, start=1):
            end = start + len(one.token_ids)
            packed.token_ids[row_idx, start:end] = one.token_ids
            packed.positions[row_idx, start:end] = np.arange(end - start)
            packed.segment_ids[row_idx, start:end] = segment_id
            packed.is_answer[row_idx, start:end] = one.is_answer
            start = end
    return packed
