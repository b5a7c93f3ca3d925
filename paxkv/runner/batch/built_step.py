"""`BuiltStep`: one step's buffer for the device, and what its answer means."""

import dataclasses

import numpy as np

from paxkv.runner.programs.bucketing import BurstShape, StepShape


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PromptSpan:
    """Tokens of one request's prompt in a step; each finds what is wanted of the next one.

    Args:
        req_idx: The request's row in the step.
        start: Of the first token in the step.
        position: Of the first token in the prompt.
    """

    req_idx: int
    start: int
    position: int
    num_tokens: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BuiltStep:
    """One step's buffer, and what the host must know to read its answer.

    Args:
        packed_np: i32[num_words], owned by nobody else.
        req_ids: Requests of the step; request r is row r of the step's arrays.
        rows_np: i32[len(req_ids)], their rows in the `InputBatch`.
        num_drawn_np: i32[len(req_ids)], tokens that the step draws for the request, or fewer where
            one of them ends it; 0 while its prompt is not finished.
        num_drawn_of_each: The one number in it; None where they differ.
        num_padded_tokens: Tokens that it computes for nobody.
        prompt_spans: Parts of prompts whose log-probabilities it finds.
    """

    shape: StepShape | BurstShape
    packed_np: np.ndarray
    req_ids: list[str]
    rows_np: np.ndarray
    num_drawn_np: np.ndarray
    num_drawn_of_each: int | None
    num_padded_tokens: int
    prompt_spans: tuple[PromptSpan, ...] = ()
