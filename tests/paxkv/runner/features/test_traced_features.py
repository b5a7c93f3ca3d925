"""Features of tests take part in the steps of a real runner, and no other code knows of them."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from paxkv.config.runner_config import RunnerConfig
from paxkv.config.sampling_params import SamplingParams
from paxkv.errors import InvariantError
from paxkv.runner import model_runner
from paxkv.runner.features.feature_list import make_features
from paxkv.runner.features.traced_features import TracedFeatures
from paxkv.runner.shapes import step_buckets
from paxkv.runner.shapes.step_variant import StepVariant
from tests.models.steppers import model_of
from tests.oracles.paged_stepper import PagedStepper
from tests.paxkv.runner.driver import RunnerDriver
from tests.paxkv.runner.features.adapters import Adapters
from tests.paxkv.runner.features.census import NUM_CLASSES, Census, class_of
from tests.paxkv.runner.features.images import Images
from tests.paxkv.runner.features.test_prompt_logprobs import check, prompt
from tests.paxkv.runner.greedy_draws import greedy_draws
from tests.paxkv.runner.shared_runners import MAX_NUM_BATCHED_TOKENS, make_runner, make_warm_runner
from tests.paxkv.runner.tiny_model import TinyModel

GREEDY = SamplingParams(temperature=0.0)
PROMPT = [5, 9, 2, 7, 11, 3, 8, 4, 6]
ADAPTER_OF = {"base": None, "first": 0, "second": 1}
SCORED = SamplingParams(temperature=0.0, prompt_logprobs=2)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(False, id="plain"),
        pytest.param(True, id="batch_invariant", marks=pytest.mark.slow),
    ],
)
def counting(request):
    """A warm runner whose list of features has a `Census`, its model, and the census."""
    census = Census()
    config = RunnerConfig(batch_invariant=request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "make_features", lambda *args: (*make_features(*args), census))
        # So that batch-invariant steps have several tiles.
        patch.setattr(step_buckets, "INVARIANT_TILE_TOKENS", 4)
        warm = make_warm_runner(
            TinyModel(windows=(None,)), config, has_few_sizes=True, draws_greedily=True
        )
    return SimpleNamespace(runner=warm.runner, model=warm.model, census=census)


def test_feature_counts_on_the_device_and_changes_no_token(counting):
    runner, census = counting.runner, counting.census
    start_np = np.asarray(census.arrays["counts"])
    outputs = {}
    for has_census in (False, True):
        driver = RunnerDriver(runner)
        driver.add("a", prompt(3, 19), GREEDY)
        driver.add("b", prompt(4, 9), SCORED)
        if has_census:
            census.counted["a"] = []
        classes = []
        with jax.transfer_guard("disallow"):
            # Alone, beside a prompt whose log-probabilities are found, and while it decodes.
            steps = [{"a": 5}, {"a": 5, "b": 9}, {"a": 9, "b": 1}, {"a": 1, "b": 1}, {"a": 1}]
            for step in steps:
                output = driver.step(step)
                classes += output.draft_token_ids.pop("a", [])
                assert output.draft_token_ids == {}
                if "b" in output.prompt_logprobs:
                    check(counting.model, prompt(4, 9), output.prompt_logprobs["b"], 2)
        outputs[has_census] = [driver.output_of(req_id) for req_id in ("a", "b")]
        computed = [*prompt(3, 19), *driver.output_of("a")[:-1]]
        expected = class_of(computed) if has_census else []
        assert classes == list(expected)
        counts_np = np.asarray(census.arrays["counts"]) - start_np
        assert counts_np.tolist() == np.bincount(expected, minlength=NUM_CLASSES).tolist()
        driver.finish_all()
    assert outputs[True] == outputs[False]
    assert runner.num_compiles_after_ready == 0
    assert census.counted == {}


def test_step_overwrites_donated_arrays_and_reads_the_others(counting):
    arrays = counting.census.arrays
    old = dict(arrays)
    driver = RunnerDriver(counting.runner)
    driver.add("a", prompt(3, 4), GREEDY)
    counting.census.counted["a"] = []
    # The second step starts before the first one's tokens are fetched.
    first = counting.runner.execute_model(driver.schedule({"a": 4}))
    driver.tokens["a"].append(0)  # a place for the token that is drawn
    second = counting.runner.execute_model(driver.schedule({"a": 1}))
    (token_id,) = first.sample_tokens().sampled_token_ids[0]
    assert second.sample_tokens().draft_token_ids == {"a": [class_of(token_id)]}
    assert old["counts"].is_deleted() and not arrays["counts"].is_deleted()
    assert arrays["class_of"] is old["class_of"] and not old["class_of"].is_deleted()
    driver.finish_all()


def test_changed_context_is_what_the_model_computes_with(counting):
    tokens = {}
    for req_id, own, other in (("a", 5, None), ("b", 6, 5)):
        driver = RunnerDriver(counting.runner)
        driver.add(req_id, prompt(own, 12), GREEDY)
        if other is not None:
            counting.census.counted[req_id] = prompt(other, 12)
        driver.step({req_id: 7})  # in two parts
        tokens[req_id] = driver.run_alone(req_id, 4, MAX_NUM_BATCHED_TOKENS)
        driver.finish_all()
    assert tokens["b"] == tokens["a"]


# In the normal run, the tests of `counting` change the context, and the tests after this one change
# the parameters.
@pytest.mark.slow
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["plain", "invariant"])
def test_encoded_rows_replace_embeddings(monkeypatch, batch_invariant):
    """An image that shows the tokens of a text in reverse order is answered as this text."""
    model = model_of("llama")
    images = Images(model, num_tokens=5)
    monkeypatch.setattr(
        model_runner, "make_features", lambda *args: (*make_features(*args), images)
    )
    runner = make_runner(model, runner_config=RunnerConfig(batch_invariant=batch_invariant))
    driver = RunnerDriver(runner)
    images.images["shown"] = (2, np.array(PROMPT[2:7][::-1], np.int32))
    driver.add("shown", [*PROMPT[:2], 0, 0, 0, 0, 0, *PROMPT[7:]], GREEDY)
    driver.add("read", PROMPT, GREEDY)
    driver.add("zeros", [*PROMPT[:2], 0, 0, 0, 0, 0, *PROMPT[7:]], GREEDY)
    # The image is cut into two steps.
    driver.step({"shown": 4, "zeros": 9})
    driver.step({"shown": 5, "read": 9})
    for _ in range(4):
        driver.step(dict.fromkeys(("shown", "read", "zeros"), 1))
    answers = {req_id: driver.output_of(req_id)[:5] for req_id in ("shown", "read", "zeros")}
    assert answers["shown"] == answers["read"] != answers["zeros"]
    driver.finish_all()


class OverreachingVariant(StepVariant):
    """Updates an array that the variant does not declare."""

    def update(self, values, outputs, part, logits_of):
        return {"counts": 1}


def test_variant_that_changes_other_arrays_is_a_bug():
    features = TracedFeatures((OverreachingVariant(),), kept=({},), num_tokens=1, num_reqs=1)
    with pytest.raises(InvariantError, match=r"changes \['counts'\]; it may change .* \[\]"):
        features.update(({},), None, None, None)


@pytest.mark.parametrize(
    "batch_invariant",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["plain", "invariant"],
)
@greedy_draws()
def test_requests_of_one_step_have_adapters_of_their_own(monkeypatch, batch_invariant):
    model = model_of("llama", loops_over_layers=True)
    adapters = Adapters(model, num_adapters=2)
    monkeypatch.setattr(
        model_runner, "make_features", lambda *args: (*make_features(*args), adapters)
    )
    # Without a warm-up, it compiles the programs that the steps below need.
    runner = make_runner(model, runner_config=RunnerConfig(batch_invariant=batch_invariant))
    driver = RunnerDriver(runner)
    for req_id, adapter in ADAPTER_OF.items():
        driver.add(req_id, PROMPT, GREEDY)
        if adapter is not None:
            adapters.adapter_of[req_id] = adapter
    # Prompts in odd chunks beside each other, and steps in which all decode, with padding.
    driver.step({"first": 4, "base": 5, "second": 2})
    driver.step({"second": 7, "first": 5})
    driver.step({"base": 4, "first": 1, "second": 1})
    driver.step(dict.fromkeys(ADAPTER_OF, 1))
    if batch_invariant:
        for _ in range(7):
            driver.step(dict.fromkeys(ADAPTER_OF, 1))
    else:
        # Bursts, also of one step, and one in which a request computes fewer tokens.
        driver.step(dict.fromkeys(ADAPTER_OF, 3), num_decode_steps=3)
        driver.step({"first": 2, "base": 4, "second": 4}, num_decode_steps=4)
    outputs = {}
    oracle = PagedStepper(model)
    for req_id, adapter in ADAPTER_OF.items():
        outputs[req_id] = driver.output_of(req_id)
        oracle.params = (model if adapter is None else adapters.merged(adapter)).params
        oracle.reset()
        logits = oracle.step({0: [*PROMPT, *outputs[req_id][:-1]]})[0]
        assert outputs[req_id] == np.argmax(logits[len(PROMPT) - 1 :], axis=-1).tolist()
    driver.finish_all()
    assert len(set(map(tuple, outputs.values()))) == 3
