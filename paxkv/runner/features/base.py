"""The interface of step features: computations of a step besides that of the next tokens.

A feature has three classes, because it acts in three places:

- its `StepVariant` is traced into the programs of steps that need the feature;
- its `StepFeature` lives as long as the runner, and knows which requests ask for the feature;
- its `FeatureStep` fills one step's buffer, and reads the step's results.

To add a feature, write these classes in a file of this folder, as in `prompt_logprobs.py`, and add
the feature to the list in `feature_list.py`. No other file of the runner names a feature: the
packed buffer takes its fields, and buckets, warm-up and stored programs take its variants.

Only two kinds of variants can be in a burst. Some take part in bursts (`StepVariant.is_in_bursts`):
the host fills their fields once per burst. Others are in every program (`is_in_every_program`) and
only update arrays on the device, as in `expert_load.py`. Neither kind returns results from a burst.
"""

import math
from collections.abc import Mapping
from typing import Protocol

import jax
import numpy as np
from jax.sharding import Sharding

from paxkv.contracts.scheduler_output import ModelRunnerOutput, SchedulerOutput
from paxkv.runner.features.feature_device import FeatureDevice
from paxkv.runner.memory.zeros import put_zeros
from paxkv.runner.shapes.own_program import OwnProgram
from paxkv.runner.shapes.scheduled_rows import ScheduledRows
from paxkv.runner.shapes.step_variant import StepVariant


class FeatureStep(Protocol):
    """The host half of a feature for one step.

    Attributes:
        variant: The variant that the step's program must have. None: the step needs no variant.
    """

    variant: StepVariant | None

    @property
    def is_repeatable(self) -> bool:
        """Whether this object also serves repetitions of its burst, without filling fields."""
        return False

    @property
    def needs_step(self) -> bool:
        """Whether the program must be a step, because another program runs after it."""
        return False

    @property
    def verifies_drafts(self) -> bool:
        """Whether a burst should verify drafts that its program finds."""
        return False

    def in_plain_burst(self) -> "FeatureStep":
        """Returns this object for a burst whose program verifies no drafts."""
        return self

    def fill(self, views: Mapping[str, np.ndarray]) -> None:
        """Fills the variant's fields, which start as zeros."""
        ...

    def record_tokens(self) -> None:
        """Called when the step's tokens were fetched, before the results of other programs."""

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

    @property
    def handles(self) -> frozenset[str]:
        """Fields of a decision, or of its new requests, that only this feature computes.

        A subset of "lora_name", "mm_features", "is_pooled", "scheduled_encoder_inputs" and
        "kv_connector_metadata". The runner rejects decisions with fields that no feature handles.
        """
        return frozenset()

    @property
    def max_drafts(self) -> int:
        """Most drafts of one request that the feature proposes with `FeatureStep.finish`.

        They go into `ModelRunnerOutput.draft_token_ids`.
        """
        return 0

    def num_bytes(self) -> int:
        """Bytes of `arrays`. The memory plan leaves room for them."""
        return sum(
            math.prod(array.dims) * np.dtype(array.dtype).itemsize
            for variant in self.variants()
            for array in variant.arrays().values()
        )

    def allocate(self, sharding: Sharding) -> None:
        """Makes `arrays`, by default of zeros."""
        self.arrays = {
            name: put_zeros(array.dims, array.dtype, sharding)
            for variant in self.variants()
            for name, array in variant.arrays().items()
        }

    def variants(self) -> tuple[StepVariant, ...]:
        """All variants that a step may need; they are compiled before the first request.

        A step may combine any of them with a variant of another feature that it may meet. Each
        such combination has programs.
        """
        ...

    def programs(self) -> tuple[OwnProgram, ...]:
        """Programs of the feature's own, none by default; compiled before the first request."""
        return ()

    def before_step(self, scheduler_output: SchedulerOutput, device: FeatureDevice) -> None:
        """Called with each decision before its step is built, even if the step has no tokens.

        Blocks of finished requests still hold what the requests wrote.
        """
        ...

    def after_step(self, device: FeatureDevice) -> None:
        """Called when a step has been started. Programs started here run after the step."""
        return None

    def plan(self, step: ScheduledRows) -> FeatureStep | None:
        """Plans one step. `step` has the requests' state before the step.

        Returns:
            None if the feature does nothing in this step, except by a variant in every program.
            After None or a repeatable `FeatureStep` for a burst, the runner does not call `plan`
            while the burst repeats.
        """
        ...

    def finish_empty(self, output: ModelRunnerOutput) -> ModelRunnerOutput:
        """Returns the output of a step without tokens, with the additions of the feature.

        Such a step has no `FeatureStep`. While all requests wait for a KV connector, only this
        method can report that their blocks are loaded.
        """
        return output

    def stats(self, *, only_new: bool) -> Mapping[str, object]:
        """Returns the fields of `SchedulerStats` that the feature knows; none by default.

        Must not wait for the device, because it is called after each step.

        Args:
            only_new: Leave out fields that have not changed since the last call with `only_new`.
        """
        return {}
