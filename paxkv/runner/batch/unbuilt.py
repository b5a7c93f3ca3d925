"""Refuses what a step's decision may contain and the device half cannot compute yet."""

from paxkv.contracts.scheduler_output import SchedulerOutput
from paxkv.errors import InvariantError


def refuse_unbuilt(scheduler_output: SchedulerOutput) -> None:
    """Checks that a step has nothing which would be left out in silence.

    Raises:
        InvariantError: It has. Requests that lead to it are to be refused where they come in.
    """
    wanted = {
        "draft tokens to verify": list(scheduler_output.scheduled_spec_decode_tokens),
        "encoder inputs": list(scheduler_output.scheduled_encoder_inputs),
        "LoRA adapters": [r.req_id for r in scheduler_output.scheduled_new_reqs if r.lora_name],
        "multimodal items": [
            r.req_id for r in scheduler_output.scheduled_new_reqs if r.mm_features
        ],
    }
    unbuilt = {name: req_ids for name, req_ids in wanted.items() if req_ids}
    if unbuilt:
        raise InvariantError(f"the runner cannot compute this yet, of these requests: {unbuilt}.")
    if scheduler_output.kv_connector_metadata is not None:
        raise InvariantError(
            "the runner has no KV connector, got metadata of "
            f"{type(scheduler_output.kv_connector_metadata).__name__}."
        )
