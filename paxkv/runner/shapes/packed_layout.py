"""`PackedLayout`: where each integer of a step lies in the one buffer that goes to the device."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np

from paxkv.errors import InvariantError
from paxkv.runner.shapes.program_shapes import BurstShape, StepShape
from paxkv.runner.shapes.sampling_row import NUM_COLUMNS
from paxkv.runner.shapes.step_variant import StepVariant

# Most tokens whose drawing ends a request in a burst. The scheduler checks for further tokens.
MAX_ENDING_IDS = 8


def table_field(inputs_idx: int) -> str:
    """The field with the block tables of `ForwardBatch.groups[inputs_idx]`."""
    return f"block_tables_{inputs_idx}"


@dataclasses.dataclass(frozen=True, slots=True)
class PackedLayout:
    """Layout of the buffer of one shape: NumPy fills `views`, `jit` reads `unpack`."""

    shape: StepShape | BurstShape

    def fields(self) -> dict[str, tuple[int, ...]]:
        """Shape of each field, in the order of the buffer; all are int32.

        Raises:
            InvariantError: A feature of the step has a field with a name that is taken.
        """
        s = self.shape
        tables = {table_field(i): table.packed_dims(s.num_reqs) for i, table in enumerate(s.tables)}
        if isinstance(s, BurstShape):
            fields = _tokens(s.num_reqs) | tables | _burst_fields(s)
            return _add_features(fields, s.features, num_tokens=s.num_reqs, num_reqs=s.num_reqs)
        fields = _tokens(s.num_tokens) | tables | _step_fields(s)
        return _add_features(fields, s.features, num_tokens=s.num_tokens, num_reqs=s.num_reqs)

    @property
    def num_words(self) -> int:
        return sum(math.prod(dims) for dims in self.fields().values())

    def spans(self) -> dict[str, tuple[slice, tuple[int, ...]]]:
        """The words of the buffer that hold each field, and the field's shape."""
        spans = {}
        start = 0
        for name, dims in self.fields().items():
            end = start + math.prod(dims)
            spans[name] = (slice(start, end), dims)
            start = end
        return spans

    def views(self, packed_np: np.ndarray) -> dict[str, np.ndarray]:
        """The fields as writable views of `packed_np` i32[num_words]."""
        return {
            name: packed_np[words].reshape(dims) for name, (words, dims) in self.spans().items()
        }

    def unpack(self, packed: jax.Array) -> dict[str, jax.Array]:
        """The same fields of `packed` i32[num_words], under `jit`."""
        return {
            name: jax.lax.slice(packed, (words.start,), (words.stop,)).reshape(dims)
            for name, (words, dims) in self.spans().items()
        }


def _tokens(num_tokens: int) -> dict[str, tuple[int, ...]]:
    return {
        "token_ids": (num_tokens,),
        # Which token to take: an index into the previous step's tokens, still on the device,
        # or max_num_seqs for the one in `token_ids`.
        "token_source": (num_tokens,),
        "positions": (num_tokens,),
    }


def _step_fields(s: StepShape) -> dict[str, tuple[int, ...]]:
    fields = {
        "query_start_loc": (s.num_reqs + 1,),
        "seq_lens": (s.num_reqs,),
        "logits_indices": (s.num_logits,),
        "sampling_rows": (s.num_logits, NUM_COLUMNS),
        # Position of the token that the row draws; 0 if it draws none.
        "draw_position": (s.num_logits,),
    }
    if s.max_draws == 1:
        return fields
    if any(table.is_state for table in s.tables):
        # See `StateInputs`.
        fields["state_ends"] = (s.num_reqs,)
    # For each row of logits: its index among the rows of its request, and the request's index.
    return fields | {"draw_idx": (s.num_logits,), "draw_req": (s.num_logits,)}


def _add_features(
    fields: dict[str, tuple[int, ...]],
    features: Sequence[StepVariant],
    *,
    num_tokens: int,
    num_reqs: int,
) -> dict[str, tuple[int, ...]]:
    if any(variant.reads_tenancies for variant in features):
        # The row of each request, and a number that no earlier request of the row had.
        fields = fields | {"tenancies": (2, num_reqs)}
    for variant in features:
        added = variant.fields(num_tokens=num_tokens, num_reqs=num_reqs)
        taken = fields.keys() & added.keys()
        if taken:
            raise InvariantError(
                f"{variant} adds fields that the buffer of a step has already: {sorted(taken)}. "
                "Give them other names."
            )
        fields = fields | added
    return fields


def _burst_fields(s: BurstShape) -> dict[str, tuple[int, ...]]:
    fields = {
        "num_steps": (1,),
        # 1: the burst leaves its logits for the sampler, and draws nothing.
        "leaves_logits": (1,),
        # Tokens that the row computes, at most one per step; 0 is a row without a request.
        "num_tokens": (s.num_reqs,),
        "sampling_rows": (s.num_reqs, NUM_COLUMNS),
        # 1 if the row draws; 0 if its token is inside the prompt.
        "draws": (s.num_reqs,),
        # Tokens that end the row's request if they are drawn for the position `first_end` or a
        # later one. Unused entries are -1.
        "ending_ids": (s.num_reqs, MAX_ENDING_IDS),
        "first_end": (s.num_reqs,),
    }
    if any(table.is_state for table in s.tables):
        # Position of the first token whose state goes to the second slot.
        fields["slot_switch"] = (s.num_reqs,)
    return fields
