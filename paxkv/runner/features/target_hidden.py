"""A step feature that keeps the hidden states of a step on the device, for a draft head."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp

from models import LoadedModel, Outputs, Wants
from models.loading.loaded_draft_model import LoadedDrafter
from paxkv.config.engine_config import RunnerConfig
from paxkv.contracts.scheduler_output import SchedulerOutput
from paxkv.runner.features.base import FeatureStep, StepFeature
from paxkv.runner.features.feature_device import FeatureDevice
from paxkv.runner.shapes.bucket_sizes import INVARIANT_TILE_TOKENS
from paxkv.runner.shapes.scheduled_rows import ScheduledRows
from paxkv.runner.shapes.step_variant import DeviceArray, StepPart, StepVariant

_HIDDEN = "target_hidden"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TargetHiddenVariant(StepVariant):
    """Writes hidden states of all tokens, one row for each token.

    Args:
        num_tokens: The largest number of tokens of a step.
        taps: Layers whose hidden states are written, side by side. Empty: only the
            hidden states after the last norm.
    """

    num_tokens: int
    hidden_size: int
    dtype: str
    taps: tuple[int, ...] = ()

    @property
    def is_in_every_program(self) -> bool:
        return True

    def arrays(self) -> Mapping[str, DeviceArray]:
        dims = (self.num_tokens, self.hidden_size * (len(self.taps) or 1))
        return {_HIDDEN: DeviceArray(dims=dims, dtype=self.dtype, is_donated=True)}

    def wants(self, wants: Wants) -> Wants:
        if self.taps:
            return dataclasses.replace(wants, taps=self.taps)
        return dataclasses.replace(wants, hidden="all")

    def update(
        self,
        values: Mapping[str, jax.Array],
        outputs: Outputs,
        part: StepPart,
        logits_of: Callable[[jax.Array], jax.Array],
    ) -> Mapping[str, jax.Array]:
        hidden = jnp.concatenate(outputs.taps, axis=-1) if self.taps else outputs.hidden
        return {_HIDDEN: part.write(values[_HIDDEN], hidden)}


class TargetHidden(StepFeature):
    """Owns the array of hidden states. The next step overwrites it.

    Args:
        variant: None: the drafter reads no hidden states.
        max_drafts: Most drafts that the head proposes for a request.
    """

    def __init__(self, variant: TargetHiddenVariant | None, *, max_drafts: int) -> None:
        self._variant = variant
        self._max_drafts = max_drafts

    @property
    def max_drafts(self) -> int:
        return self._max_drafts

    @property
    def hidden(self) -> jax.Array | None:  # f[num_tokens, width]
        """The hidden states of the last step; other rows are of earlier steps."""
        return self.arrays.get(_HIDDEN)

    def variants(self) -> tuple[StepVariant, ...]:
        return () if self._variant is None else (self._variant,)

    def before_step(self, scheduler_output: SchedulerOutput, device: FeatureDevice) -> None:
        """Does nothing."""

    def plan(self, step: ScheduledRows) -> FeatureStep | None:
        """Returns None, because the variant is in every program and needs nothing from the host."""
        return None


def make_target_hidden(
    config: RunnerConfig, model: LoadedModel, head: LoadedDrafter, *, max_num_batched_tokens: int
) -> TargetHidden:
    """Makes the feature for the draft head of `config.speculative_config`."""
    max_drafts = config.speculative_config.num_speculative_tokens
    if not head.reads_hidden:
        return TargetHidden(None, max_drafts=max_drafts)
    tile_tokens = INVARIANT_TILE_TOKENS if config.batch_invariant else 1
    variant = TargetHiddenVariant(
        num_tokens=-(-max_num_batched_tokens // tile_tokens) * tile_tokens,
        hidden_size=model.config.hidden_size,
        dtype=model.dtype,
        taps=head.taps,
    )
    return TargetHidden(variant, max_drafts=max_drafts)


def abstract_target_hidden(variants: Iterable[StepVariant]) -> DeviceArray:
    """Returns the array of hidden states of a step that has a `TargetHiddenVariant`."""
    (variant,) = (v for v in variants if isinstance(v, TargetHiddenVariant))
    return variant.arrays()[_HIDDEN]
