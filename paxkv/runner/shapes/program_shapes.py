"""Every dimension of a compiled program. `step_buckets.py` decides which of them an engine has."""

import bisect
import dataclasses
import math
from typing import Literal

from models import Wants
from paxkv.config.speculative_config import SpeculativeConfig
from paxkv.runner.shapes.own_program import OwnProgram
from paxkv.runner.shapes.step_variant import StepVariant, add_wants

# Slots of states of each row whose blocks the device keeps. A decoding request writes three slots
# in turn, so it sends the blocks of each slot once.
SLOTS_PER_ROW = 3
# A step that starts more requests needs several calls.
_MAX_WRITTEN_SLOTS = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TableShape:
    """The block tables of KV cache groups that share an array of a step (`GroupInputs`).

    Args:
        is_state: The columns are the blocks of a state, not of token positions (`StateInputs`).
            The groups are then parts of the slots of one KV cache group (`MambaSpec`). Each request
            has two slots, which may be the same. The state is read from the first slot and written
            to the second.
    """

    num_groups: int
    max_blocks_per_req: int
    block_size: int
    is_state: bool = False

    @property
    def num_kv_cache_groups(self) -> int:
        return 1 if self.is_state else self.num_groups

    def dims(self, num_reqs: int) -> tuple[int, ...]:
        """Dimensions of the array of a step with this many requests."""
        dims = (self.num_groups, num_reqs, self.max_blocks_per_req)
        return (2, *dims) if self.is_state else dims

    def packed_dims(self, num_reqs: int) -> tuple[int, ...]:
        """Dimensions of the field in a step's buffer.

        The field of states has the indices of the requests' slots. The device knows the blocks of
        each slot (`SlotShape`).
        """
        return (2, num_reqs) if self.is_state else self.dims(num_reqs)

    def slot_shape(self, max_num_seqs: int) -> "SlotShape":
        """The shape of the slots of a table of states."""
        num_slots = SLOTS_PER_ROW * max_num_seqs
        return SlotShape(
            num_slots=1 + num_slots,
            num_groups=self.num_groups,
            blocks_per_state=self.max_blocks_per_req,
            num_written=min(_MAX_WRITTEN_SLOTS, num_slots),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Every dimension of one compiled step, named as in `models/forward/forward_batch.py`.

    Args:
        tile_tokens: The step computes this many tokens at a time, and skips tiles without tokens.
            A divisor of `num_tokens`. None: all tokens at once.
        features: Further computations, in the order of the runner's features.
        widths: Numbers of tokens that its layers can compute, in rising order. The step uses the
            smallest that holds its tokens. The last is `num_tokens`; empty means only that one.
        num_logits: Rows of logits. A request has up to `max_draws` of them.
        logits: "last" if the rows are the last tokens of the requests, in order. The last layer
            then computes no other rows. "indices" for any rows (`Wants`).
        max_draws: Most tokens that one request draws: 1, and 1 more for each draft that a step can
            verify.
    """

    num_tokens: int
    num_reqs: int
    num_logits: int
    logits: Literal["last", "indices"]
    max_draws: int = 1
    tables: tuple[TableShape, ...]
    tile_tokens: int | None = None
    features: tuple[StepVariant, ...] = ()
    widths: tuple[int, ...] = ()

    @property
    def wants(self) -> Wants:
        """The outputs that the step needs from the model."""
        return add_wants(Wants(logits=self.logits), self.features)

    def num_computed(self, num_tokens: int) -> int:
        """Number of tokens that a step of `num_tokens` computes, with padding."""
        if self.tile_tokens is None:
            return _least_width(self.widths or (self.num_tokens,), num_tokens)
        return -(-num_tokens // self.tile_tokens) * self.tile_tokens


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NgramShape:
    """The static sizes of n-gram drafts that the device finds.

    Args:
        num_drafts: Most drafts of each row in a step.
        shortest: The smallest number of tokens to find.
        longest: The largest number of tokens to find.
    """

    num_drafts: int
    shortest: int
    longest: int

    @classmethod
    def of_config(cls, config: SpeculativeConfig) -> "NgramShape":
        """The drafts that the method "ngram" asks for."""
        shortest, longest = config.lookup_lengths
        num_drafts = config.num_speculative_tokens
        return cls(num_drafts=num_drafts, shortest=shortest, longest=longest)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DrafterShape:
    """The static sizes of drafts that a head or a draft model proposes inside a burst.

    Args:
        num_drafts: Most drafts of each row in a step.
        req_widths: Numbers of requests that the layers can compute, as `StepShape.widths`.
    """

    num_drafts: int
    req_widths: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BurstShape:
    """Every dimension of one compiled burst: up to `max_steps` tokens of each request.

    Args:
        drafts: Its steps verify these drafts. None: a step computes one token per request.
        widths: Numbers of tokens that a step can compute, as `StepShape.widths`. The last is
            `num_tokens`.
        max_model_len: Tokens of a row that the device can keep.
        chunk_rows: Rows that it draws at a time.
        features: Further computations, in the order of the runner's features.
    """

    max_steps: int
    num_reqs: int
    tables: tuple[TableShape, ...]
    max_model_len: int
    widths: tuple[int, ...] = ()
    chunk_rows: int
    features: tuple[StepVariant, ...] = ()
    drafts: NgramShape | DrafterShape | None = None

    @property
    def num_tokens(self) -> int:
        """Most tokens that a step computes.

        With states, a step also computes the drafts that the step before it accepted.
        """
        return self.num_draws + self.has_states * (self.num_draws - self.num_reqs)

    @property
    def num_draws(self) -> int:
        """Most tokens that a step draws."""
        return self.num_reqs * (1 if self.drafts is None else 1 + self.drafts.num_drafts)

    @property
    def has_states(self) -> bool:
        return any(table.is_state for table in self.tables)

    def num_computed(self, num_tokens: int) -> int:
        """Number of tokens that a step of `num_tokens` computes, with padding."""
        return _least_width(self.widths or (self.num_tokens,), num_tokens)


def _least_width(widths: tuple[int, ...], count: int) -> int:
    return widths[bisect.bisect_left(widths, count)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CopyShape:
    """The dimension of one compiled program that copies blocks."""

    num_copies: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplerShape:
    """The dimensions of the one compiled program that draws the tokens of steps.

    Args:
        num_rows: Largest number of rows of logits in a step.
        num_reqs: Largest number of requests in a step.
        max_draws: As in `StepShape`.
        max_model_len: Tokens of a row that the device can keep.
        chunk_rows: Rows that it draws at a time; at most `num_rows`.
    """

    num_rows: int
    num_reqs: int
    max_draws: int = 1
    max_model_len: int
    chunk_rows: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowShape:
    """The dimensions of the one compiled program that writes a request's row of the `RowState`."""

    num_rows: int
    max_model_len: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlotShape:
    """The dimensions of the compiled program that writes which blocks slots of states consist of.

    Args:
        num_slots: Slots whose blocks the device keeps. Slot 0 consists of null blocks.
        num_written: Most slots that one call writes.
    """

    num_slots: int
    num_groups: int
    blocks_per_state: int
    num_written: int

    @property
    def dims(self) -> tuple[int, ...]:
        """Dimensions of the array on the device."""
        return (self.num_slots, self.num_groups, self.blocks_per_state)

    @property
    def num_bytes(self) -> int:
        return 4 * math.prod(self.dims)

    @property
    def packed_dims(self) -> tuple[int, ...]:
        """Dimensions of a call's buffer: the index of each slot, and then its blocks."""
        return (self.num_written, 1 + self.num_groups * self.blocks_per_state)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape:
    """The dimensions of the compiled program of a draft head, which runs after steps of one shape.

    Args:
        num_drafts: Most drafts of a request.
        token_widths: Numbers of tokens that the layers can compute, as `StepShape.widths`.
        req_widths: Numbers of requests that the layers can compute for the drafts after the first.
    """

    step: StepShape
    num_drafts: int
    token_widths: tuple[int, ...] = ()
    req_widths: tuple[int, ...] = ()


ProgramShape = (
    StepShape
    | BurstShape
    | CopyShape
    | SamplerShape
    | RowShape
    | SlotShape
    | DraftShape
    | OwnProgram
)
