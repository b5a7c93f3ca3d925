"""The stream of training batches: each is a pure function of the seed and the step."""

from dataclasses import dataclass
from random import Random

from tokenizers import Tokenizer

from models.demo.data import sample_conversation
from models.demo.packing import EncodedConversation, PackedRows, encode_conversations, pack


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """Rows and their length; one shape for each kind of batch, so two programs compile."""

    num_rows: int
    row_length: int


SHORT_BATCH = BatchShape(num_rows=16, row_length=192)
LONG_BATCH = BatchShape(num_rows=4, row_length=640)
# One step in this many trains on conversations with a long system prompt.
LONG_BATCH_PERIOD = 10
# Encoded at once while a batch is being filled.
_CHUNK = {SHORT_BATCH: 64, LONG_BATCH: 16}


def training_batch(tokenizer: Tokenizer, *, seed: int, step: int) -> PackedRows:
    """Draws the conversations of one step and packs them into full rows."""
    rng = Random(f"{seed}/{step}")
    is_long = step % LONG_BATCH_PERIOD == LONG_BATCH_PERIOD - 1
    shape = LONG_BATCH if is_long else SHORT_BATCH
    rows: list[list[EncodedConversation]] = [[] for _ in range(shape.num_rows)]
    room = [shape.row_length] * shape.num_rows
    num_misses = 0
    while num_misses < shape.num_rows:
        drawn = [sample_conversation(rng, is_long=is_long) for _ in range(_CHUNK[shape])]
        for one in encode_conversations(tokenizer, drawn):
            length = len(one.token_ids)
            row_idx = next((i for i, free in enumerate(room) if free >= length), None)
            if row_idx is None:
                num_misses += 1
                continue
            rows[row_idx].append(one)
            room[row_idx] -= length
    return pack(rows, row_length=shape.row_length)
