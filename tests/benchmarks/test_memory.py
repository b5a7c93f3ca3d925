"""Waste equals the count by hand."""

import json
from pathlib import Path

import pytest

from benchmarks import memory
from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.engine_request import EngineRequest


# Two steps hold 16 and 17 tokens in one block and in two, or 13 and 14 in one.
@pytest.mark.parametrize(
    ("num_prompt_tokens", "num_allocated", "num_power_of_two"),
    [(16, 16 + 32, 2 * 32), (13, 2 * 16, 2 * 16)],
)
def test_waste_of_one_request_is_that_by_hand(
    num_prompt_tokens: int, num_allocated: int, num_power_of_two: int
) -> None:
    request = EngineRequest(
        request_id="r",
        prompt_token_ids=list(range(num_prompt_tokens)),
        sampling_params=SamplingParams(max_tokens=3, ignore_eos=True),
    )
    figures = memory.measure([request], block_size=16, pool_tokens=256, seed=0)
    num_reserved = {
        "paged": num_allocated,
        "contiguous exact": 2 * (num_prompt_tokens + 3),
        "contiguous power of two": num_power_of_two,
        "contiguous max_model_len": 2 * 2048,
    }
    num_held = 2 * num_prompt_tokens + 1
    waste = {name: 100 * (1 - num_held / num) for name, num in num_reserved.items()}
    memory_percent = 100 * num_allocated / 4096
    assert figures == pytest.approx(waste | {"memory": memory_percent, "requests at once": 1})


def test_command_writes_a_row_per_scheme(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    assert memory.main(["--lengths", "mixed", "--seeds", "0", "1", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["num_repetitions"] for row in rows} == {2}
    of_schemes = [row for row in rows if row["metric"] == "waste_percent"]
    waste = {row["case"].partition(" scheme=")[2]: row["median"] for row in of_schemes}
    assert set(waste) == {*memory.RESERVATIONS, "paged, blocks of 16", "paged, blocks of 64"}
    assert 0 < waste["paged, blocks of 16"] < waste["paged, blocks of 64"] < 25
