"""A feature of tests copies blocks to the host and back, with programs of its own."""

import jax
import pytest

from paxkv.config.sampling_params import SamplingParams
from paxkv.runner import model_runner
from paxkv.runner.features.feature_device import FeatureDevice
from paxkv.runner.features.feature_list import make_features
from tests.paxkv.runner.driver import RunnerDriver
from tests.paxkv.runner.features.block_keeper import BlockKeeper
from tests.paxkv.runner.features.test_prompt_logprobs import prompt
from tests.paxkv.runner.shared_runners import make_warm_runner
from tests.paxkv.runner.tiny_model import TinyModel

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def keeping(folder_of_run):
    """A warm runner with a `BlockKeeper`."""
    keeper = BlockKeeper(num_blocks=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "make_features", lambda *args: (*make_features(*args), keeper))
        warm = make_warm_runner(folder_of_run / "keeping", TinyModel())
    return warm.runner, keeper


def run_whole(driver, req_id, token_ids, num_new):
    driver.add(req_id, token_ids, GREEDY)
    return driver.run_alone(req_id, num_new, max_chunk=14)


@pytest.mark.parametrize("writes", [True, False])
def test_blocks_of_a_finished_request_serve_another(keeping, writes):
    """Without the blocks, the answer is another."""
    runner, keeper = keeping
    driver = RunnerDriver(runner)
    token_ids = prompt(7 if writes else 8, 20)
    expected = run_whole(driver, "a", token_ids, 5)
    # Two blocks of 8 tokens are full of the prompt.
    keeper.blocks_of["a"] = driver.blocks["a"][0][:2]
    driver.finish("a")
    # Other requests write to the blocks in the same step.
    driver.add("other", prompt(3, 14), GREEDY)
    num_steps = keeper.num_steps
    with jax.transfer_guard("allow"):
        driver.step({"other": 14})
    assert keeper.num_steps == num_steps + 1
    driver.add("b", token_ids, GREEDY)
    # The blocks of "a" may still hold its keys and values, so "b" gets other blocks.
    blocks = [driver.free_blocks.pop(0) for _ in range(2)]
    driver.num_holders.update(blocks)
    driver.blocks["b"][0] += blocks
    driver.num_computed["b"] = 16
    if writes:
        keeper.to_write.append(("a", blocks))
    found = driver.run_alone("b", 5, max_chunk=14)
    driver.finish_all()
    assert (found == expected) == writes
    assert runner.num_compiles_after_ready == 0


def test_a_feature_gets_programs_for_the_pages_as_they_are():
    asked = []
    device = FeatureDevice(
        "pages", sharding=None, program=lambda shape, pages: asked.append((shape, pages))
    )
    device.program("a")
    device.pages = "others"
    device.program("b")
    assert asked == [("a", "pages"), ("b", "others")]
