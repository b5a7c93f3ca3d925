"""`BuiltStep`: one step's buffer for the device, and the data to read its result."""

import dataclasses

import numpy as np

from paxkv.runner.features.base import FeatureStep
from paxkv.runner.shapes.program_shapes import BurstShape, StepShape


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BuiltStep:
    """One step's buffer, and what the host must know to read the result.

    Args:
        packed_np: i32[num_words], used by this step only.
        req_ids: Requests of the step; request r is row r of the step's arrays.
        rows_np: i32[len(req_ids)], their rows in the `InputBatch`.
        num_drawn_np: i32[len(req_ids)], most tokens that the step draws for the request; 0 while
            its prompt is not finished. There are fewer if one ends the request or differs from its
            draft.
        num_drawn_of_each: The number in `num_drawn_np`, if it is the same for all; otherwise None.
        num_drafts_np: i32[len(req_ids)], drafts that the step verifies for the request.
        first_draw_np: i32[len(req_ids)], the request's first row of logits. Its other rows follow.
        following_ids_np: i32[shape.num_reqs], the token after the request's last one in the step; 0
            if the host does not know it. None for a burst.
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
    following_ids_np: np.ndarray | None = None
    features: tuple[FeatureStep, ...] = ()
    leaves_logits: bool = False
