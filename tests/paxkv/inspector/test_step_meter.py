"""Durations and tokens of steps are summed; first tokens are measured once."""

from paxkv.contracts.engine_output import EngineCoreOutput
from paxkv.inspector.step_meter import StepMeter


def output(request_id, num_tokens, finish_reason=None):
    return EngineCoreOutput(
        request_id=request_id, new_token_ids=[1] * num_tokens, finish_reason=finish_reason
    )


def test_time_to_first_token_is_measured_once():
    meter = StepMeter()
    meter.on_arrival("a", 10.0)
    meter.on_arrival("gone", 10.0)
    meter.on_step([output("a", 0)], took_s=3.0, wait_s=2.0, now_s=11.0)
    meter.on_step([output("a", 2), output("b", 1)], took_s=0.5, wait_s=0.25, now_s=12.5)
    assert meter.pop_ttfts({"a"}) == [2.5]
    meter.on_step([output("a", 1, "stop"), output("gone", 1)], took_s=0, wait_s=0, now_s=13.0)
    assert meter.pop_ttfts({"a"}) == []
    assert (meter.num_steps, meter.num_output_tokens) == (3, 5)
    meter.on_step([output("b", 1)] * 4, took_s=0, wait_s=0, now_s=13.0, is_one_token_each=True)
    assert (meter.num_steps, meter.num_output_tokens) == (4, 9)
    assert (meter.host_s, meter.device_s) == (1.25, 2.25)
