"""Protocols between the engine core and the executor that computes its steps."""

import dataclasses
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from paxkv.contracts.kv_cache_spec import KVCacheConfig
from paxkv.contracts.scheduler_output import ModelRunnerOutput, SchedulerOutput


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GrammarBitmask:
    """One row for each token that a step draws for a request which a grammar binds.

    Args:
        req_ids: The request of each row. A request with k drafts has 1 + k rows, in the order of
            the drawn tokens' positions. Requests may come in any order.
        bitmask_np: i32[len(req_ids), ceil(vocab_size / 32)], bit `t % 32` of word `t // 32` set
            where token t is allowed: llguidance's layout. Bits past the vocabulary are ignored. A
            request that may draw anything for now has a row of ones (-1 in every word).
    """

    req_ids: list[str]
    bitmask_np: np.ndarray


class StepHandle(Protocol):
    """A step on its way: tokens may still be on the device.

    Where a request draws a token that a grammar binds (`NewRequestData.needs_grammar`), the device
    computes the logits and then waits for `start_sampling`, so that the host finds out what the
    grammars allow meanwhile. Other steps draw their tokens by themselves.
    """

    @property
    def needs_bitmask(self) -> bool:
        """Whether it waits for `start_sampling`."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether its tokens are there, so that `sample_tokens` would not wait."""
        ...

    def start_sampling(self, grammar_bitmask: GrammarBitmask) -> None:
        """Has the device draw the tokens; returns without waiting for it.

        Called once where `needs_bitmask`, before the next `execute_model` and `sample_tokens`.

        Raises:
            InvariantError: The step does not wait for it; or a row that it needs is missing, or is
                that of a request which draws nothing in the step.
        """
        ...

    def sample_tokens(self) -> ModelRunnerOutput:
        """Waits for the device and brings the sampled tokens home, once."""
        ...


class Executor(Protocol):
    """Computes steps: one device today, a mesh or another host later."""

    @property
    def kv_cache_config(self) -> KVCacheConfig: ...

    @property
    def num_padded_tokens(self) -> int:
        """Padding tokens computed since the start."""
        ...

    @property
    def num_corrupted_requests(self) -> int:
        """Requests that had logits that are no finite numbers; 0 where none are checked."""
        ...

    @property
    def num_compiles_after_ready(self) -> int:
        """Programs compiled after the warm-up said that all were ready; 0 is the promise."""
        ...

    def feature_stats(self, *, only_new: bool) -> Mapping[str, object]:
        """Fields of `SchedulerStats` that features of steps know; does not wait for the device.

        Args:
            only_new: Leave out what has not changed since the last call with `only_new`.
        """
        ...

    def start_profile(self, folder: str) -> bool:
        """Begins to record a profile; False while a recording runs."""
        ...

    def stop_profile(self) -> bool:
        """Writes what was recorded; False where nothing was."""
        ...

    def execute_model(self, scheduler_output: SchedulerOutput) -> StepHandle:
        """Starts one step and returns without waiting for the device."""
        ...
