"""Messages are encoded and decoded unchanged; other bytes are rejected."""

import pytest

from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.engine_output import (
    EngineCoreOutput,
    EngineDead,
    RequestTimes,
    SchedulerStats,
    StepOutputs,
    UtilityReply,
)
from paxkv.contracts.engine_request import (
    AbortRequests,
    AddRequest,
    EngineRequest,
    Shutdown,
    UtilityCall,
)
from paxkv.contracts.engine_start import (
    EngineHello,
    EngineReady,
    EngineStartFailed,
    ModelFound,
    ModelInfo,
)
from paxkv.contracts.scheduler_output import TokenLogprobs
from paxkv.contracts.wire import decode_input, decode_output, encode
from paxkv.errors import InvariantError

REQUEST = EngineRequest(
    request_id="r1",
    prompt_token_ids=[1, 2, 3],
    sampling_params=SamplingParams(temperature=0.5, stop=["\n"], stop_token_ids=[7], seed=-3),
    eos_token_ids=(2, 5),
    arrival_time=12.5,
    priority=-1,
    cache_salt="tenant",
)
LOGPROBS = TokenLogprobs(
    token_logprob=-0.5, token_rank=2, top_token_ids=[4, 9], top_logprobs=[-0.1, -0.5]
)


@pytest.mark.parametrize(
    "message",
    [
        AddRequest(request=REQUEST),
        AbortRequests(request_ids=["a", "b"]),
        UtilityCall(call_id=3, method="get_stats"),
        Shutdown(drain=True),
    ],
)
def test_input_decodes_to_an_equal_message(message) -> None:
    assert decode_input(encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        StepOutputs(
            outputs=[
                EngineCoreOutput(request_id="a", new_token_ids=[9], logprobs=[LOGPROBS]),
                EngineCoreOutput(
                    request_id="b", new_token_ids=[], finish_reason="stop", stop_reason=7
                ),
            ],
            stats=SchedulerStats(num_running_reqs=2),
            timestamp=1.0,
            monotonic_s=2.0,
            request_times={"a": RequestTimes(queue_s=0.5, prefill_s=2.0)},
        ),
        UtilityReply(call_id=3, result_json="{}"),
        EngineDead(reason="out of memory"),
        EngineHello(input_endpoint="ipc:///run/inputs"),
        ModelFound(folder="/models/a"),
        EngineReady(
            model_info=ModelInfo(
                served_model_name="a",
                model="b",
                max_model_len=8,
                vocab_size=9,
                max_fitting_tokens=10,
                created=11,
                max_num_seqs=8,
                cache_settings={"block_size": "16"},
            ),
            eos_token_ids=(2, 5),
            max_prompt_tokens=None,
            stats=SchedulerStats(num_blocks=3),
        ),
        EngineStartFailed(message="no such model", is_mistake=True),
    ],
)
def test_output_decodes_to_an_equal_message(message) -> None:
    assert decode_output(encode(message)) == message


@pytest.mark.parametrize("data", [b"", b"\x93", encode(Shutdown())[:-1], b"\x92\xa4Evil\xc0"])
def test_invalid_bytes_are_rejected(data: bytes) -> None:
    with pytest.raises(InvariantError, match="not a message"):
        decode_input(data)
    with pytest.raises(InvariantError, match="not a message"):
        decode_output(data)
