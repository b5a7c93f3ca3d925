"""`TargetHiddenVariant`: keeps the hidden states of a step on the device, for a draft head."""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from models import LoadedModel, Outputs, Wants
from models.loading.loaded_draft_model import LoadedDrafter
from paxkv.config.runner_config import RunnerConfig
from paxkv.runner.features.head_memory import head_memory_arrays
from paxkv.runner.shapes.bucket_sizes import INVARIANT_TILE_TOKENS
from paxkv.runner.shapes.step_variant import DeviceArray, StepPart, StepVariant

_HIDDEN = "target_hidden"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TargetHiddenVariant(StepVariant):
    """Writes hidden states of all tokens, one row for each token.

    Args:
        num_tokens: The largest number of tokens of a step, or of one step of a burst.
        taps: Layers whose hidden states are written, side by side. Empty: only the
            hidden states after the last norm.
        num_kept_rows: Rows for which a `HeadMemory` is kept from program to program; 0 without
            drafts in bursts. `head_size` is the size of the head's hidden states.
    """

    num_tokens: int
    hidden_size: int
    dtype: str
    taps: tuple[int, ...] = ()
    num_kept_rows: int = 0
    head_size: int = 0

    @property
    def is_in_every_program(self) -> bool:
        return True

    @property
    def is_for_draft_head(self) -> bool:
        return True

    @property
    def reads_tenancies(self) -> bool:
        return self.num_kept_rows > 0

    def arrays(self) -> Mapping[str, DeviceArray]:
        dims = (self.num_tokens, self.hidden_size * (len(self.taps) or 1))
        arrays = {_HIDDEN: DeviceArray(dims=dims, dtype=self.dtype, is_donated=True)}
        if self.num_kept_rows == 0:
            return arrays
        return arrays | head_memory_arrays(
            num_rows=self.num_kept_rows, hidden_size=self.head_size, dtype=self.dtype
        )

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


def make_target_hidden(
    config: RunnerConfig,
    model: LoadedModel,
    head: LoadedDrafter,
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
) -> TargetHiddenVariant | None:
    """Makes the variant for a drafter; None if the drafter reads no hidden states."""
    if not head.reads_hidden:
        return None
    speculative = config.speculative_config
    # A step has whole tiles, and at most one tile more than its tokens need (`StepBuckets`).
    num_padded = 2 * INVARIANT_TILE_TOKENS if config.batch_invariant else 0
    num_tokens = max_num_batched_tokens + num_padded
    if speculative.drafts_in_bursts:
        # A step of a burst draws no more tokens than a step with prompts computes. With states, it
        # also computes the drafts that the step before accepted.
        num_tokens *= 2
    return TargetHiddenVariant(
        num_tokens=num_tokens,
        hidden_size=model.config.hidden_size,
        dtype=model.dtype,
        taps=head.taps,
        num_kept_rows=max_num_seqs if speculative.drafts_in_bursts else 0,
        head_size=head.config.hidden_size,
    )


def target_hidden_of(arrays: Mapping[str, jax.Array]) -> jax.Array | None:
    """Returns the hidden states f[num_tokens, width] of the last step; None if there are none."""
    return arrays.get(_HIDDEN)
