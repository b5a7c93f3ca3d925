"""`StepVariant`: code that a step feature adds to a program, as a part of the program's shape."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import jax

from models import ForwardBatch, LayerContext, Outputs, Wants


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """The tokens of one call of the model.

    They are the tokens of a whole step, of a tile of a batch-invariant step, or of one step of a
    burst.

    Args:
        start: i32[], the index of the part's first token in the step.
        batch: The model's input for the part.
        fields: The fields of the whole step's buffer, by name. `token_ids` includes the tokens that
            the previous step sampled. In a burst, all fields belong to its first step.
    """

    start: jax.Array
    batch: ForwardBatch
    fields: Mapping[str, jax.Array]

    def read(self, rows: jax.Array) -> jax.Array:  # [num_tokens of the step, ...] -> [of the part]
        """Takes the part's rows out of an array with a row for each token of the step."""
        num_tokens = self.batch.token_ids.shape[0]
        return jax.lax.dynamic_slice_in_dim(rows, self.start, num_tokens)

    def write(self, rows: jax.Array, part_rows: jax.Array) -> jax.Array:
        """Returns `rows`, with the part's rows replaced by `part_rows`."""
        return jax.lax.dynamic_update_slice_in_dim(rows, part_rows, self.start, axis=0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceArray:
    """An array that a feature keeps on the device from step to step.

    Args:
        is_donated: Steps overwrite it; otherwise they only read it.
    """

    dims: tuple[int, ...]
    dtype: str
    is_donated: bool


class StepVariant(Protocol):
    """The code that a feature adds to the programs of steps that need it; the defaults add nothing.

    A variant is a frozen dataclass of integers and strings that derives from this class. It is a
    part of a program's shape. Equal variants therefore share a program, and a stored program is
    found by the variant's repr. A step has at most one variant of each feature.
    """

    @property
    def has_every_bucket(self) -> bool:
        """Whether each bucket has a program with it; otherwise only the largest has."""
        return False

    @property
    def is_in_bursts(self) -> bool:
        """Whether requests that need the variant may decode in bursts.

        Such a variant has no results. Its fields are the same in all steps of a burst, in which
        `num_tokens` of `fields` is the number of requests.
        """
        return False

    def may_meet(self, other: "StepVariant") -> bool:
        """Whether one step may have this variant and a variant of another feature.

        Both variants must agree. Only combinations that may meet are compiled.
        """
        return True

    @property
    def is_in_every_program(self) -> bool:
        """Whether all steps and bursts have the variant, so that it adds no program.

        With `is_for_draft_head`, fewer steps and bursts have it. Such a variant must be the only
        one of its feature, and have no fields and no results. The feature need not plan steps with
        it.
        """
        return False

    @property
    def is_for_draft_head(self) -> bool:
        """Whether only programs that verify drafts, or run before the draft head, have the variant.

        Only variants with `is_in_every_program` may return True.
        """
        return False

    @property
    def reads_tenancies(self) -> bool:
        """Whether the buffer of a program with the variant has the field `tenancies`.

        `PackedLayout` adds the field, because a variant in every program has no `fields`.
        """
        return False

    def fields(self, *, num_tokens: int, num_reqs: int) -> Mapping[str, tuple[int, ...]]:
        """Names and dimensions of the variant's fields in a step's buffer. Names must be unique."""
        return {}

    def arrays(self) -> Mapping[str, DeviceArray]:
        """The arrays of `StepFeature.arrays` that the step needs, by name."""
        return {}

    def results(self, *, num_tokens: int, num_reqs: int) -> Mapping[str, tuple[int, ...]]:
        """Names and dimensions of the int32 arrays that the step leaves for the host."""
        return {}

    def wants(self, wants: Wants) -> Wants:
        """Returns `wants` with the outputs added that the feature needs from the model."""
        return wants

    def apply(
        self, context: LayerContext, part: StepPart, values: Mapping[str, jax.Array]
    ) -> LayerContext:
        """Returns the context that the embedding and all layers get for a part; called in `jit`.

        A change of `context.batch` does not change which outputs the model returns.

        Args:
            values: See `update`.
        """
        return context

    def update(
        self,
        values: Mapping[str, jax.Array],
        outputs: Outputs,
        part: StepPart,
        logits_of: Callable[[jax.Array], jax.Array],
    ) -> Mapping[str, jax.Array]:
        """Returns new values of results and donated arrays after a part; called in `jit`.

        Values that it does not return stay as they are.

        Args:
            values: Arrays and results by name; results are zeros before the first part.
            outputs: The model's outputs for the part.
            logits_of: Computes f32[num_tokens, vocab] of f[num_tokens, hidden] from `outputs`.
        """
        return {}


def add_wants(wants: Wants, variants: Iterable[StepVariant]) -> Wants:
    """Returns `wants` with the outputs added that all variants need from the model."""
    for variant in variants:
        wants = variant.wants(wants)
    return wants
