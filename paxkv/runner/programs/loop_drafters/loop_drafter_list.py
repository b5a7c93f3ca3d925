"""Makes the drafter of a burst."""

from models import LoadedModel
from models.loading.loaded_draft_model import LoadedDrafter
from models.loading.loaded_head import LoadedHead
from paxkv.runner.features.head_memory import HeadMemory
from paxkv.runner.programs.loop_drafters.base import LoopDrafter
from paxkv.runner.programs.loop_drafters.draft_model import ModelLoopDrafter
from paxkv.runner.programs.loop_drafters.head import HeadLoopDrafter
from paxkv.runner.programs.loop_drafters.ngram import NgramLoopDrafter
from paxkv.runner.programs.step import Params
from paxkv.runner.shapes.program_shapes import DrafterShape, NgramShape


def make_loop_drafter(
    model: LoadedModel,
    shape: NgramShape | DrafterShape,
    head: LoadedDrafter | None,
    params: Params,
    head_params: Params,
    memory: HeadMemory | None,
) -> LoopDrafter:
    """Makes the drafter of a shape, while a program is traced.

    Args:
        head: The drafter with weights of a `DrafterShape`.
        params: The arrays of `model`. `head_params` are the arrays of `head`.
        memory: Of a draft head before the first step; None for other drafters.
    """
    if isinstance(shape, NgramShape):
        return NgramLoopDrafter(shape)
    if isinstance(head, LoadedHead):
        return HeadLoopDrafter(
            first=memory,
            model=model,
            params=params,
            head=head,
            head_params=head_params,
            num_drafts=shape.num_drafts,
            widths=shape.req_widths,
        )
    return ModelLoopDrafter(
        model=head, params=head_params, num_drafts=shape.num_drafts, widths=shape.req_widths
    )
