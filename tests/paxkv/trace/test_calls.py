"""A call contains the scheduler's arguments and its whole result."""

import dataclasses

import msgspec

from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.engine_request import EngineRequest, MultiModalFeature
from paxkv.contracts.scheduler_output import (
    BlockCopy,
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
)
from paxkv.trace.calls import (
    AddRequestCall,
    CachedRow,
    Decision,
    NewRow,
    SampledRow,
    UpdateCall,
    encode_request,
)

FULL_REQUEST = EngineRequest(
    request_id="r",
    prompt_token_ids=[1, 2, 3],
    sampling_params=SamplingParams(
        max_tokens=3, temperature=0.5, stop_token_ids=[5], seed=-3, stop=["é"], logit_bias={7: -1.5}
    ),
    eos_token_ids=(0, 9),
    arrival_time=1234567890.123456,
    priority=-2,
    cache_salt="s",
    lora_name="l",
    mm_features=(MultiModalFeature(identifier="i", offset=1, length=2),),
    bad_words_token_ids=((5,), (6, 7)),
    scarce_token_ids=(7,),
    needs_grammar=True,
    is_pooled=True,
    has_heavy_grammar=True,
    fork_from="other",
    keep_blocks=True,
    is_streamed=True,
    num_truncated_tokens=4,
    num_leading_tokens=2,
)


def test_encoded_request_decodes_to_an_equal_request() -> None:
    for request in (
        FULL_REQUEST,
        EngineRequest(request_id="", prompt_token_ids=[], sampling_params=SamplingParams()),
    ):
        line = msgspec.json.encode(AddRequestCall(request=encode_request(request)))
        call = msgspec.json.decode(line, type=AddRequestCall)
        assert call.engine_request() == request


def test_full_request_of_this_test_sets_every_field() -> None:
    """Otherwise, the test above would not notice that a new field is lost."""
    for field in dataclasses.fields(EngineRequest):
        assert getattr(FULL_REQUEST, field.name) != field.default


def test_fields_with_their_default_are_omitted() -> None:
    request = EngineRequest(request_id="r", prompt_token_ids=[1], sampling_params=SamplingParams())
    assert msgspec.json.decode(encode_request(request)) == {
        "request_id": "r",
        "prompt_token_ids": [1],
        "sampling_params": {},
    }


def test_decision_contains_every_field_of_a_scheduler_output() -> None:
    """A replay cannot compare fields that the decision omits."""
    output = SchedulerOutput(
        scheduled_new_reqs=[
            NewRequestData(
                req_id="n",
                prompt_token_ids=[1, 2],
                sampling_params=SamplingParams(),
                block_ids=([4], [5]),
                num_computed_tokens=1,
            )
        ],
        scheduled_cached_reqs=CachedRequestData(
            req_ids=["a", "b"],
            resumed_req_ids=frozenset({"b"}),
            new_block_ids=[None, ([1, 2], [3])],
            num_computed_tokens=[10, 0],
            num_output_tokens=[3, 1],
            all_token_ids={"b": [1, 2, 3]},
        ),
        num_scheduled_tokens={"b": 3, "a": 2, "n": 1},
        total_num_scheduled_tokens=6,
        preempted_req_ids=frozenset({"y", "x"}),
        finished_req_ids=frozenset({"z"}),
        num_decode_steps=4,
        scheduled_spec_decode_tokens={"a": [8]},
        scheduled_encoder_inputs={"n": [0]},
        free_encoder_mm_hashes=["image"],
        num_common_prefix_blocks=[1, 0],
        block_copies=[BlockCopy(source_block_id=6, target_block_id=7)],
        slot_switches={"a": 12},
    )
    assert Decision.from_output(output) == Decision(
        num_decode_steps=4,
        running=[CachedRow("a", 2, 10, 3, None)],
        resumed=[CachedRow("b", 3, 0, 1, [[1, 2], [3]])],
        new=[NewRow("n", 1, 1, [[4], [5]])],
        preempted=["x", "y"],
        finished=["z"],
        order=["b", "a", "n"],
        spec_decode_tokens={"a": [8]},
        encoder_inputs={"n": [0]},
        free_encoder_mm_hashes=["image"],
        num_common_prefix_blocks=[1, 0],
        block_copies=[(6, 7)],
        slot_switches={"a": 12},
    )
    # The only omitted field is `kv_connector_metadata`.
    empty = {field.name for field in dataclasses.fields(output) if not getattr(output, field.name)}
    assert empty == {"kv_connector_metadata"}


def test_runner_output_is_restored_without_logprobs() -> None:
    call = UpdateCall(
        step=1,
        sampled=[SampledRow("a", [1, 2]), SampledRow("b", [])],
        draft_token_ids={"a": [3]},
        burst_drafts={"a": [(2, 1)]},
        pooled=["b"],
    )
    output = call.runner_output()
    assert (output.req_ids, output.sampled_token_ids) == (["a", "b"], [[1, 2], []])
    assert (output.logprobs, output.draft_token_ids) == ([None, None], {"a": [3]})
    assert (output.burst_drafts, output.pooler_output) == ({"a": [(2, 1)]}, {"b": []})
