"""`Wants`, the choice of what a step of the model returns, and `Outputs`, what it returned."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import jax

from models.errors import ModelError
from models.forward.report import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Wants:
    """What a step is to return. Static, so each choice is a program of its own.

    Args:
        logits: For which tokens the caller computes logits: for none, for the last token of each
            request, or for the tokens in `ForwardBatch.logits_indices`.
        hidden: Tokens whose hidden states after the last norm are returned.
        taps: Numbers of layers in rising order. Their hidden states of all tokens are returned, for
            a drafter to read.
        reports: Numbers of the layers; all have different names.
    """

    logits: Literal["none", "last", "indices"] = "indices"
    hidden: Literal["none", "last", "all"] = "none"
    taps: tuple[int, ...] = ()
    reports: tuple[Report, ...] = ()

    @property
    def last_tokens_alone(self) -> bool:
        """Whether other tokens only have to write the last layer's keys and values."""
        return self.logits != "indices" and self.hidden != "all" and not self.taps

    def check_taps(self, num_layers: int) -> None:
        """Checks that `taps` are layers of a model with `num_layers`.

        Raises:
            ModelError: A number is of no layer, or the numbers do not rise.
        """
        if list(self.taps) != sorted({tap for tap in self.taps if 0 <= tap < num_layers}):
            raise ModelError(
                f"taps are {self.taps}; wanted different layers in rising order, each in "
                f"[0, {num_layers})."
            )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Outputs:
    """What `Wants` asked for; None where it was not asked for."""

    for_logits: jax.Array | None  # f[num_logits, hidden], what `compute_logits` takes
    hidden: jax.Array | None  # f[num_reqs, hidden] or f[num_tokens, hidden]
    taps: tuple[jax.Array, ...]  # f[num_tokens, hidden] for each
    # By name of the `Report`: i32[num_layers, *dims], zeros for layers that reported nothing.
    reports: Mapping[str, jax.Array] = field(default_factory=dict)
