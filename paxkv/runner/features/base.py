"""The interface of step features: what a step computes besides the next tokens.

A feature has three classes, because it acts in three places:

- its `StepVariant` is traced into the programs of steps that need the feature;
- its `StepFeature` lives as long as the runner, and knows which requests ask for the feature;
- its `FeatureStep` fills one step's buffer, and reads what comes back.

To add a feature, write these classes in a file of this folder, as in `prompt_logprobs.py`, and add
the feature to the list in `feature_list.py`. No other file of the runner names a feature: the
packed buffer takes its fields, and buckets, warm-up and stored programs take its variants.

A step with a variant is never a burst, unless the variant is in every program
(`StepVariant.is_in_every_program`). Such a variant counts what the device computes, as in
`expert_load.py`: it needs nothing from the host per step, and leaves nothing for it.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import jax
import numpy as np
from jax.sharding import Sharding

from models import ForwardBatch, LayerContext, Outputs, Wants
from paxkv.contracts.scheduler_output import ModelRunnerOutput, SchedulerOutput
from paxkv.runner.batch.scheduled_rows import ScheduledRows
from paxkv.runner.memory.zeros import put_zeros


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """Tokens that the model computes at once.

    They are those of a whole step, of a tile of a batch-invariant step, or of one step of a burst.

    Args:
        start: i32[], the part's first token in the step.
        batch: What the model gets of the part.
        fields: Of the whole step's buffer, by name. In `token_ids`, tokens that the step before it
            drew are filled in. A burst has none for features.
    """

    start: jax.Array
    batch: ForwardBatch
    fields: Mapping[str, jax.Array]

    def read(self, rows: jax.Array) -> jax.Array:  # [num_tokens of the step, ...] -> [of the part]
        """The part's own, of an array with a row for each token of the step."""
        num_tokens = self.batch.token_ids.shape[0]
        return jax.lax.dynamic_slice_in_dim(rows, self.start, num_tokens)

    def write(self, rows: jax.Array, part_rows: jax.Array) -> jax.Array:
        """`rows`, with those of the part replaced."""
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
    """What a feature adds to the programs of steps that need it; the defaults add nothing.

    A frozen dataclass of integers and strings that derives from this class. Shapes hold it: equal
    variants are one program, and stored programs are found by its repr. A step has at most one
    variant of each feature.
    """

    @property
    def has_every_bucket(self) -> bool:
        """Whether each bucket of tokens has a program with it; otherwise the largest step has."""
        return False

    @property
    def is_in_every_program(self) -> bool:
        """Whether all steps and bursts have it, so that it adds no program.

        It must be the only variant of its feature, and have no fields and no results. The feature
        need not plan steps with it.
        """
        return False

    def fields(self, *, num_tokens: int, num_reqs: int) -> Mapping[str, tuple[int, ...]]:
        """Names and dimensions of its fields in a step's buffer; no other field has these names."""
        return {}

    def arrays(self) -> Mapping[str, DeviceArray]:
        """The arrays of `StepFeature.arrays` that the step is given, by name."""
        return {}

    def results(self, *, num_tokens: int, num_reqs: int) -> Mapping[str, tuple[int, ...]]:
        """Names and dimensions of the int32 arrays that the step leaves for the host."""
        return {}

    def wants(self, wants: Wants) -> Wants:
        """`wants`, and what the feature needs of the model."""
        return wants

    def apply(
        self, context: LayerContext, part: StepPart, values: Mapping[str, jax.Array]
    ) -> LayerContext:
        """The context that the embedding and all layers get of a part; called under `jit`.

        A change of `context.batch` does not change which outputs are taken.

        Args:
            values: As of `update`.
        """
        return context

    def update(
        self,
        values: Mapping[str, jax.Array],
        outputs: Outputs,
        part: StepPart,
        logits_of: Callable[[jax.Array], jax.Array],
    ) -> Mapping[str, jax.Array]:
        """New values of results and donated arrays, after a part of a step; called under `jit`.

        Values that it leaves out stay as they are.

        Args:
            values: Arrays and results by name; results are zeros before the first part.
            outputs: Of the model, for the part.
            logits_of: Computes f32[num_tokens, vocab] of f[num_tokens, hidden] from `outputs`.
        """
        return {}


def add_wants(wants: Wants, variants: Iterable[StepVariant]) -> Wants:
    """`wants`, and what all variants need of the model."""
    for variant in variants:
        wants = variant.wants(wants)
    return wants


class FeatureStep(Protocol):
    """What a feature does in one step.

    Attributes:
        variant: The variant that the step's program must have. None: any program will do.
    """

    variant: StepVariant | None

    def fill(self, views: Mapping[str, np.ndarray]) -> None:
        """Fills the variant's fields, which are zeros before."""
        ...

    def finish(
        self, output: ModelRunnerOutput, results: Mapping[str, np.ndarray]
    ) -> ModelRunnerOutput:
        """The step's output, with what the feature adds or changes.

        Called when the step's tokens are fetched: the next step may have been built by then.

        Args:
            results: Of the variant; empty without one.
        """
        ...


class StepFeature(Protocol):
    """A feature on the host; owned by the runner, and called in the order of steps.

    Attributes:
        arrays: Those of its variants, by name. A step replaces the arrays that are donated to it.
            The feature may replace any of them in `before_step`.
    """

    arrays: dict[str, jax.Array]

    def allocate(self, sharding: Sharding) -> None:
        """Makes `arrays`, before the memory for the KV cache is measured; zeros by default."""
        self.arrays = {
            name: put_zeros(array.dims, array.dtype, sharding)
            for variant in self.variants()
            for name, array in variant.arrays().items()
        }

    def variants(self) -> tuple[StepVariant, ...]:
        """All variants that a step may need; they are compiled before the first request.

        Any of them may meet any variant of another feature in one step, so each combination has a
        program.
        """
        ...

    def before_step(self, scheduler_output: SchedulerOutput) -> None:
        """Reads each decision, also one that computes no token; called before the step is built."""
        ...

    def plan(self, step: ScheduledRows) -> FeatureStep | None:
        """Plans one step; `step` has the state of its requests before it.

        Returns:
            None if the feature does nothing in this step, except what a variant in every program
            does. It is then not asked for bursts that repeat this one at later positions.
        """
        ...

    def stats(self, *, only_new: bool) -> Mapping[str, object]:
        """Fields of `SchedulerStats` that the feature knows; none by default.

        Must not wait for the device, because it is called after each step.

        Args:
            only_new: Leave out what has not changed since the last call with `only_new`.
        """
        return {}
