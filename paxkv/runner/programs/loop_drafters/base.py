"""The interface of drafters that run inside a loop on the device.

A drafter is made while a program is traced, so it may own arrays such as its weights. Its memory is
a part of the loop's state. Drafts only change how many steps the loop takes.
"""

from typing import Any, NamedTuple, Protocol

import jax

from models import ForwardBatch, Outputs, Pages
from paxkv.runner.programs.decode_loop import DecodeRows


class DraftedRows(NamedTuple):
    """The rows before a step. `token_ids[row, positions[row]]` is the last known token of a row."""

    rows: DecodeRows
    token_ids: jax.Array  # i32[num_rows, max_tokens], of prompt and output
    positions: jax.Array  # i32[num_rows], as in `DraftingState`
    num_useful: jax.Array  # i32[num_rows], most drafts that the step verifies for the row
    # For each row, the tokens that its states lack, up to its last known token. The batch writes
    # the same states as the step, because both write them before drafts. None without states.
    known: ForwardBatch | None = None
    # bool[num_rows], whether `known` writes the row's first slot, as in `StateRows`.
    writes_first: jax.Array | bool = False


class VerifiedStep(NamedTuple):
    """A step after its draws were accepted or rejected.

    A row that had ended before the step computed known tokens again, and drew nothing.
    """

    batch: ForwardBatch
    row_of_token: jax.Array  # i32[num_tokens], any row for padding
    # i32[num_rows], index of each row's last known token; its first draw is for the token after it
    first_draws: jax.Array
    outputs: Outputs
    token_ids: jax.Array  # i32[num_rows, max_tokens], with the tokens that the step drew
    num_kept: jax.Array  # i32[num_rows], tokens that the row drew; they are in `token_ids`
    is_alive: jax.Array  # bool[num_rows], whether the row takes part in the next step


class LoopDrafter(Protocol):
    """Proposes drafts before each step of the loop.

    Attributes:
        num_drafts: Most drafts of a row in a step.
    """

    @property
    def num_drafts(self) -> int: ...

    def first_memory(self, num_rows: int) -> Any:
        """Returns the memory before the first step, a pytree. By default, it is empty."""
        return ()

    def propose(
        self, drafted: DraftedRows, pages: Pages, memory: Any
    ) -> tuple[jax.Array, Pages]:  # i32[num_rows, num_drafts], `NO_TOKEN` after the last draft
        """Returns drafts, and the pages after the drafter wrote its keys and values.

        Writes only positions that the step may write too: up to `num_useful` after `positions`.
        """
        ...

    def read_step(
        self, rows: DecodeRows, step: VerifiedStep, pages: Pages, memory: Any
    ) -> tuple[Pages, Any]:
        """Returns the pages and the memory after a step. By default, they do not change."""
        return pages, memory
