"""The interface of step features: computations of a step besides that of the next tokens.

A feature has three classes, because it acts in three places:

- its `StepVariant` is traced into the programs of steps that need the feature;
- its `StepFeature` lives as long as the runner, and knows which requests ask for the feature;
- its `FeatureStep` fills one step's buffer, and reads what comes back.

To add a feature, write these classes in a file of this folder, as in `prompt_logprobs.py`, and add
the feature to the list in `feature_list.py`. No other file of the runner names a feature: the
packed buffer takes its fields, and buckets, warm-up and stored programs take its variants.

A step with a variant is never a burst, unless the variant is in every program
(`StepVariant.is_in_every_program`). Such a variant only updates arrays on the device, as in
`expert_load.py`. It gets nothing from the host in a step, and returns no results to it.
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
    """The tokens of one call of the model.

    They are the tokens of a whole step, of a tile of a batch-invariant step, or of one step of a
    burst.

    Args:
        start: i32[], the index of the part's first token in the step.
        batch: The model's input for the part.
        fields: The fields of the whole step's buffer, by name. `token_ids` includes the tokens that
            the previous step sampled. A burst has no fields of features.
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
        """Whether each bucket of tokens has a program with it; otherwise only the largest has."""
        return False

    @property
    def is_in_every_program(self) -> bool:
        """Whether all steps and bursts have the variant, so that it adds no program.

        Such a variant must be the only one of its feature, and have no fields and no results. The
        feature need not plan steps with it.
        """
        return False

    def fields(self, *, num_tokens: int, num_reqs: int) -> Mapping[str, tuple[int, ...]]:
        """Names and dimensions of the variant's fields in a step's buffer. Names must be unique."""
        return {}

    def arrays(self) -> Mapping[str, DeviceArray]:
        """The arrays of `StepFeature.arrays` that the step is given, by name."""
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


class FeatureStep(Protocol):
    """The host half of a feature for one step.

    Attributes:
        variant: The variant that the step's program must have. None: the step needs no variant.
    """

    variant: StepVariant | None

    def fill(self, views: Mapping[str, np.ndarray]) -> None:
        """Fills the variant's fields, which start as zeros."""
        ...

    def finish(
        self, output: ModelRunnerOutput, results: Mapping[str, np.ndarray]
    ) -> ModelRunnerOutput:
        """Returns the step's output, with the additions and changes of the feature.

        Called when the step's tokens are fetched. The next step may have been built by then.

        Args:
            results: The variant's results; empty without a variant.
        """
        ...


class StepFeature(Protocol):
    """A feature on the host. The runner owns it, and calls it in the order of steps.

    Attributes:
        arrays: The arrays of its variants, by name. A step replaces the arrays that are donated to
            it. The feature may replace any of them in `before_step`.
    """

    arrays: dict[str, jax.Array]

    def allocate(self, sharding: Sharding) -> None:
        """Makes `arrays`, by default zeros; called before the KV cache's memory is measured."""
        self.arrays = {
            name: put_zeros(array.dims, array.dtype, sharding)
            for variant in self.variants()
            for name, array in variant.arrays().items()
        }

    def variants(self) -> tuple[StepVariant, ...]:
        """All variants that a step may need; they are compiled before the first request.

        A step may combine any of them with any variant of another feature, so each combination has
        a program.
        """
        ...

    def before_step(self, scheduler_output: SchedulerOutput) -> None:
        """Called with each decision before its step is built, even if the step has no tokens."""
        ...

    def plan(self, step: ScheduledRows) -> FeatureStep | None:
        """Plans one step. `step` has the requests' state before the step.

        Returns:
            None if the feature does nothing in this step, except by a variant in every program. If
            the step is a burst, the runner then does not call `plan` for later bursts that repeat
            it at later positions.
        """
        ...

    def stats(self, *, only_new: bool) -> Mapping[str, object]:
        """Returns the fields of `SchedulerStats` that the feature knows; none by default.

        Must not wait for the device, because it is called after each step.

        Args:
            only_new: Leave out fields that have not changed since the last call with `only_new`.
        """
        return {}
