"""The runner rejects steps that it cannot compute as a whole."""

import dataclasses

import pytest

from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.engine_request import MultiModalFeature
from paxkv.contracts.scheduler_output import (
    KVConnectorMetadata,
    NewRequestData,
    SchedulerOutput,
)
from paxkv.errors import InvariantError
from paxkv.runner.batch.unbuilt import refuse_unbuilt
from tests.paxkv.no_cached import NO_CACHED

NEW = NewRequestData(
    req_id="a",
    prompt_token_ids=[1],
    sampling_params=SamplingParams(),
    block_ids=([1],),
    num_computed_tokens=0,
)
PLAIN = SchedulerOutput(
    scheduled_new_reqs=[NEW],
    scheduled_cached_reqs=NO_CACHED,
    num_scheduled_tokens={"a": 1},
    total_num_scheduled_tokens=1,
    preempted_req_ids=frozenset(),
    finished_req_ids=frozenset(),
    free_encoder_mm_hashes=["x"],
    num_common_prefix_blocks=[1],
)
IMAGE = MultiModalFeature(identifier="x", offset=0, length=1)


def test_plain_step_passes():
    refuse_unbuilt(PLAIN)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scheduled_spec_decode_tokens": {"a": [1]}}, r"more than 0 drafts': \['a'\]"),
        ({"scheduled_encoder_inputs": {"a": [0]}}, r"encoder_inputs.*\['a'\]"),
        ({"scheduled_new_reqs": [dataclasses.replace(NEW, lora_name="x")]}, "lora_name"),
        ({"scheduled_new_reqs": [dataclasses.replace(NEW, mm_features=(IMAGE,))]}, "mm_features"),
        ({"scheduled_new_reqs": [dataclasses.replace(NEW, is_pooled=True)]}, "is_pooled"),
        ({"kv_connector_metadata": KVConnectorMetadata(loads=[], saves=[])}, "no KV connector"),
    ],
)
def test_parts_without_a_feature_are_rejected(changes, message):
    with pytest.raises(InvariantError, match=message):
        refuse_unbuilt(dataclasses.replace(PLAIN, **changes))


@pytest.mark.parametrize(
    ("changes", "handled"),
    [
        ({"scheduled_encoder_inputs": {"a": [0]}}, "scheduled_encoder_inputs"),
        ({"scheduled_new_reqs": [dataclasses.replace(NEW, lora_name="x")]}, "lora_name"),
        ({"scheduled_new_reqs": [dataclasses.replace(NEW, is_pooled=True)]}, "is_pooled"),
        (
            {"kv_connector_metadata": KVConnectorMetadata(loads=[], saves=[])},
            "kv_connector_metadata",
        ),
    ],
)
def test_parts_that_a_feature_handles_pass(changes, handled):
    refuse_unbuilt(dataclasses.replace(PLAIN, **changes), {handled})


def test_as_many_drafts_pass_as_a_step_can_verify():
    drafts = dataclasses.replace(PLAIN, scheduled_spec_decode_tokens={"a": [1, 2]})
    refuse_unbuilt(drafts, max_drafts=2)
    with pytest.raises(InvariantError, match="more than 1 drafts"):
        refuse_unbuilt(drafts, max_drafts=1)
