"""Protocols between the engine core and the executor that computes its steps."""

import dataclasses
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from paxkv.contracts.kv_cache_spec import KVCacheConfig
from paxkv.contracts.scheduler_output import ModelRunnerOutput, SchedulerOutput


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GrammarBitmask:
    """One row for each token that a step samples for a request with a grammar.

    Args:
        req_ids: The request of each row. A request with k drafts has 1 + k consecutive positions,
            and its rows are in their order. Requests may come in any order.
        bitmask_np: i32[len(req_ids), ceil(vocab_size / 32)] in llguidance's layout: bit `t % 32` of
            word `t // 32` is set if token t is allowed. Bits past the vocabulary are ignored. The
            row of a request without a restriction has only ones (-1 in every word).
    """

    req_ids: list[str]
    bitmask_np: np.ndarray


class StepHandle(Protocol):
    """A step in flight, whose tokens may still be on the device.

    If the step samples a token for a request with a grammar (`NewRequestData.needs_grammar`), the
    device computes the logits and then waits for `start_sampling`. Meanwhile the host computes
    the tokens that the grammar allows. Other steps sample their tokens without a further call.
    """

    @property
    def needs_bitmask(self) -> bool:
        """Whether the step waits for `start_sampling`."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether the tokens are available, so that `sample_tokens` would not wait."""
        ...

    def start_sampling(self, grammar_bitmask: GrammarBitmask) -> None:
        """Starts sampling on the device; returns without waiting for it.

        If `needs_bitmask`, call it once, before `sample_tokens` and the next `execute_model`.

        Raises:
            InvariantError: The step needs no bitmask, a row is missing, or a row belongs to a
                request that samples nothing in this step.
        """
        ...

    def sample_tokens(self) -> ModelRunnerOutput:
        """Waits for the device and returns the sampled tokens. Must be called once."""
        ...


class Executor(Protocol):
    """Computes steps. `ModelRunner` computes them on one device or several."""

    @property
    def kv_cache_config(self) -> KVCacheConfig: ...

    @property
    def num_padded_tokens(self) -> int:
        """Padding tokens computed since the start."""
        ...

    @property
    def num_corrupted_requests(self) -> int:
        """Requests whose logits contained NaN or infinity; 0 if the executor does not check."""
        ...

    @property
    def num_compiles_after_ready(self) -> int:
        """Programs compiled after the warm-up was complete. It should stay 0."""
        ...

    def feature_stats(self, *, only_new: bool) -> Mapping[str, object]:
        """Fields of `SchedulerStats` that features of steps provide. Does not wait for the device.

        Args:
            only_new: Omit fields that have not changed since the last call with `only_new`.
        """
        ...

    def start_profile(self, folder: str) -> bool:
        """Starts recording a profile; False if a recording is in progress already."""
        ...

    def stop_profile(self) -> bool:
        """Writes the recorded profile; False if no recording is in progress."""
        ...

    def execute_model(self, scheduler_output: SchedulerOutput) -> StepHandle:
        """Starts one step and returns without waiting for the device."""
        ...

    def close(self) -> None:
        """Ends the other processes that compute, if there are any. May be repeated."""
        ...
