"""Warm runners that all tests of the runner share."""

from collections.abc import Iterator

import pytest

from paxkv.config.runner_config import RunnerConfig
from paxkv.runner import runner_plan
from paxkv.runner.features import prompt_logprobs
from paxkv.runner.model_runner import ModelRunner
from tests.paxkv.runner.driver import RunnerDriver
from tests.paxkv.runner.shared_runners import WarmRunner, make_warm_runner
from tests.paxkv.runner.tiny_model import TinyModel


@pytest.fixture(scope="session")
def one_group() -> WarmRunner:
    """Two full layers. Draws two rows at a time and finds prompt logprobs five tokens at a time."""
    with pytest.MonkeyPatch.context() as patch:
        # Neither divides the number of rows or tokens, so the last chunk overlaps the one before.
        patch.setattr(runner_plan, "SAMPLED_CHUNK_ROWS", 2)
        patch.setattr(prompt_logprobs, "_CHUNK_TOKENS", 5)
        return make_warm_runner(TinyModel(), has_few_sizes=True)


@pytest.fixture(scope="session")
def three_groups() -> WarmRunner:
    """A sliding layer, a full one, and a full one of one KV head, whose blocks are twice as long.

    Draws all rows at once; allows any number of logprobs.
    """
    model = TinyModel(seed=4, windows=(5, None, None), num_kv_heads=(2, 2, 1))
    config = RunnerConfig(max_logprobs=-1)
    warm = make_warm_runner(model, config, has_few_sizes=True)
    assert warm.runner._buckets.block_sizes == (8, 8, 16)
    return warm


@pytest.fixture(scope="session")
def batch_invariant() -> WarmRunner:
    """Two full layers, computed in batch-invariant tiles; allows any number of logprobs."""
    config = RunnerConfig(batch_invariant=True, max_logprobs=-1)
    return make_warm_runner(TinyModel(), config)


@pytest.fixture
def warm(request) -> Iterator[WarmRunner]:
    """`one_group`, or the configuration that the test's `parametrize(..., indirect=True)` names."""
    warm = request.getfixturevalue(getattr(request, "param", "one_group"))
    yield warm
    # A test that fails leaves its requests behind; the tests after it must not fail because of it.
    driver = RunnerDriver(warm.runner)
    driver.finished |= warm.runner._rows.requests.keys()
    driver.step({})


@pytest.fixture
def runner(warm) -> ModelRunner:
    return warm.runner
