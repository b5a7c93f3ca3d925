"""paxkv's measurements with a tiny model on the CPU, and figures of steps by hand."""

import pytest

from benchmarks.compare_torch.gpu_paxkv import EngineStep, paxkv_model, steady_decode


def step(end_s: float, num_tokens: int, num_started: int = 2, num_finished: int = 0) -> EngineStep:
    return EngineStep(
        end_s=end_s, num_tokens=num_tokens, num_started=num_started, num_finished=num_finished
    )


def test_steady_decode_leaves_prompts_and_ends_out() -> None:
    steps = [step(0.5, 1, num_started=1), step(1.0, 3), step(2.0, 11), step(4.0, 51)]
    # 48 tokens of 2 requests in 3 s, from the first step with both to the last before an end.
    figures = steady_decode([*steps, step(9.0, 52, num_finished=1)], 2)
    assert figures == {"step_ms": [125.0], "tokens_per_s": [16.0]}
    with pytest.raises(ValueError, match="got 1 steps of steady decode"):
        steady_decode(steps[:2], 2)


def test_every_measurement_gives_figures() -> None:
    model = paxkv_model("llama-3.1-8b", "auto", True)
    measured = [model.load(0), model.throughput(0), model.decode(4, 0), model.first_token(8, 0)]
    for of_unit in measured:
        assert all(min(values) > 0 for values in of_unit.figures.values())
    # A layer of 2 * 64 * (64 + 32) + 3 * 64 * 96 + 2 * 64 weights, the head's 256 * 64, 64, in f32;
    # keys and values of 2 heads of 16 for 4 requests of 12 + 24 / 2 tokens on average.
    weight_bytes = 4 * (12_288 + 18_432 + 128 + 16_384 + 64)
    assert measured[2].details["read_bytes_per_step"] == weight_bytes + 4 * 24 * 2 * 2 * 16 * 4
