"""A feature of tests copies blocks to the host and back, with programs of its own."""

import jax
import numpy as np
import pytest

from paxkv.config.cache_config import CacheConfig
from paxkv.config.sampling_params import SamplingParams
from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.contracts.engine_request import AddRequest, EngineRequest
from paxkv.contracts.scheduler_output import KVConnectorMetadata, KVTransfer
from paxkv.engine.engine_core import EngineCore
from paxkv.runner import model_runner
from paxkv.runner.features.feature_device import FeatureDevice
from paxkv.runner.features.feature_list import make_features
from paxkv.scheduler.scheduler import Scheduler
from tests.paxkv.runner.driver import RunnerDriver
from tests.paxkv.runner.features.block_keeper import BlockKeeper
from tests.paxkv.runner.features.test_prompt_logprobs import prompt
from tests.paxkv.runner.shared_runners import (
    MAX_MODEL_LEN,
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    make_warm_runner,
)
from tests.paxkv.runner.tiny_model import TinyModel

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def keeping():
    """A warm runner with a `BlockKeeper`."""
    keeper = BlockKeeper(num_blocks=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "make_features", lambda *args: (*make_features(*args), keeper))
        warm = make_warm_runner(TinyModel(), has_few_sizes=True)
    return warm.runner, keeper


def run_whole(driver, req_id, token_ids, num_new):
    driver.add(req_id, token_ids, GREEDY)
    return driver.run_alone(req_id, num_new, max_chunk=14)


@pytest.mark.parametrize("writes", [True, False])
def test_blocks_of_a_finished_request_serve_another(keeping, writes):
    """Without the blocks, the answer would differ."""
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


class Loader:
    """The scheduler's half of a connector: two blocks of every request can be loaded."""

    def __init__(self):
        self.loads = []

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 16 - num_computed_tokens, True

    def update_state_after_alloc(self, request, block_ids, num_external_tokens):
        if num_external_tokens > 0:
            self.loads.append(
                KVTransfer(
                    request_id=request.request_id,
                    block_ids=tuple(ids[:2] for ids in block_ids),
                    start_token_idx=0,
                    num_tokens=num_external_tokens,
                )
            )

    def build_connector_meta(self, num_computed_tokens_after_step):
        loads, self.loads = self.loads, []
        return KVConnectorMetadata(loads=loads, saves=[])

    def request_finished(self, request, block_ids):
        return False


def test_a_request_starts_when_a_connector_has_loaded_its_blocks(keeping):
    """No other request runs meanwhile, so a step without tokens must report the load."""
    runner, keeper = keeping
    driver = RunnerDriver(runner)
    token_ids = prompt(9, 20)
    expected = run_whole(driver, "a", token_ids, 5)
    blocks = keeper.blocks_of["a"] = driver.blocks["a"][0][:2]
    with jax.transfer_guard("allow"):
        driver.finish_all()
    # The request may get the blocks in which the keys and values of "a" still are.
    keeper.kept["zeros"] = np.zeros_like(keeper.kept["a"])
    keeper.to_write.append(("zeros", blocks))
    scheduler = Scheduler(
        scheduler_config=SchedulerConfig(
            max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS
        ),
        cache_config=CacheConfig(enable_prefix_caching=False),
        kv_cache_config=runner.kv_cache_config,
        max_model_len=MAX_MODEL_LEN,
        connector=Loader(),
    )
    core = EngineCore(scheduler, runner)
    keeper.source_of["b"] = "a"
    params = SamplingParams(temperature=0.0, max_tokens=5)
    core.handle(
        AddRequest(
            request=EngineRequest(
                request_id="b", prompt_token_ids=token_ids, sampling_params=params
            )
        )
    )
    outputs = []
    with jax.transfer_guard("allow"):
        # The load, the other 4 tokens of the prompt, 4 tokens, and the end.
        for _ in range(7):
            outputs += core.step().outputs
    assert not core.has_work
    assert [token_id for output in outputs for token_id in output.new_token_ids] == expected
    assert outputs[0].num_cached_tokens == 16
    core.close()


def test_a_feature_gets_programs_for_the_pages_as_they_are():
    asked = []
    device = FeatureDevice(
        "pages", sharding=None, program=lambda shape, pages: asked.append((shape, pages))
    )
    device.program("a")
    device.pages = "others"
    device.program("b")
    assert asked == [("a", "pages"), ("b", "others")]
