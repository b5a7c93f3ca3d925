"""Refuses a step whose decision has a part that neither the runner nor a feature computes."""

from collections.abc import Collection

from paxkv.contracts.scheduler_output import SchedulerOutput
from paxkv.errors import InvariantError


def refuse_unbuilt(
    scheduler_output: SchedulerOutput, handled: Collection[str] = (), *, max_drafts: int = 0
) -> None:
    """Checks that no part of a step would be ignored.

    Args:
        handled: Parts that features handle (`StepFeature.handles`).
        max_drafts: Most drafts of a request.

    Raises:
        InvariantError: A part would be ignored. The engine must refuse requests that lead to it
            when they arrive.
    """
    new_reqs = scheduler_output.scheduled_new_reqs
    drafts = scheduler_output.scheduled_spec_decode_tokens
    found = {
        "scheduled_encoder_inputs": list(scheduler_output.scheduled_encoder_inputs),
        "lora_name": [new_req.req_id for new_req in new_reqs if new_req.lora_name],
        "mm_features": [new_req.req_id for new_req in new_reqs if new_req.mm_features],
        "is_pooled": [new_req.req_id for new_req in new_reqs if new_req.is_pooled],
        f"more than {max_drafts} drafts": [
            req_id for req_id, draft_ids in drafts.items() if len(draft_ids) > max_drafts
        ],
    }
    unbuilt = {part: req_ids for part, req_ids in found.items() if req_ids and part not in handled}
    if unbuilt:
        raise InvariantError(f"the runner cannot compute these parts of requests: {unbuilt}.")
    metadata = scheduler_output.kv_connector_metadata
    if metadata is not None and "kv_connector_metadata" not in handled:
        raise InvariantError(
            f"the runner has no KV connector, got metadata of {type(metadata).__name__}."
        )
