"""`BuiltStep`: one step's buffer for the device, and what its answer means."""

import dataclasses

import numpy as np

from paxkv.runner.features.base import FeatureStep
from paxkv.runner.shapes.program_shapes import BurstShape, StepShape


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BuiltStep:
    """One step's buffer, and what the host must know to read its answer.

    Args:
        packed_np: i32[num_words], used by this step only.
        req_ids: Requests of the step; request r is row r of the step's arrays.
        rows_np: i32[len(req_ids)], their rows in the `InputBatch`.
        num_drawn_np: i32[len(req_ids)], tokens that the step draws for the request; 0 while its
            prompt is not finished. Fewer come if one of them ends the request, or is not the draft.
        num_drawn_of_each: The one number in it; None where they differ.
        num_drafts_np: i32[len(req_ids)], drafts that the step verifies for the request.
        first_draw_np: i32[len(req_ids)], the request's first row of logits. Its other rows follow.
        num_padded_tokens: Padding tokens that it computes.
        features: What step features do in it.
        leaves_logits: Whether the sampler must draw after a burst. It always draws after steps.
    """

    shape: StepShape | BurstShape
    packed_np: np.ndarray
    req_ids: list[str]
    rows_np: np.ndarray
    num_drawn_np: np.ndarray
    num_drawn_of_each: int | None
    num_drafts_np: np.ndarray
    first_draw_np: np.ndarray
    num_padded_tokens: int
    features: tuple[FeatureStep, ...] = ()
    leaves_logits: bool = False
