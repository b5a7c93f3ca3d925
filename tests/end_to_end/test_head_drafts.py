"""Drafts of heads with weights change no answer, under random settings."""

import dataclasses
import functools
import random
from collections import defaultdict

import pytest

from models import load_model
from models.loading.kernel_encoder import KernelEncoder
from models.loading.load_head import load_eagle3_head, load_mtp_head
from models.loading.loaded_draft_model import LoadedDraftModel
from paxkv.config.runner_config import RunnerConfig
from paxkv.config.speculative_config import SpeculativeConfig
from paxkv.runner import ModelRunner
from paxkv.runner.batch.device_step import DeviceStep
from paxkv.runner.drafters.depth_pacer import DepthPacer
from paxkv.runner.features import feature_list
from tests.end_to_end.engine_runs import run
from tests.end_to_end.head_checkpoints import make_llama_checkpoint, make_mtp_checkpoint
from tests.end_to_end.test_drafts import REQUESTS, check_equal, make_request
from tests.end_to_end.test_drafts import compiler as compiler
from tests.models.drafters.eagle3_checkpoints import write_eagle3_head
from tests.models.drafters.head_stepper import HeadStepper
from tests.oracles.paged_stepper import PagedStepper
from tests.paxkv.runner.features.test_prompt_logprobs import prompt
from tests.paxkv.runner.shared_runners import MAX_MODEL_LEN, make_warm_runner
from tests.paxkv.runner.tiny_model import VOCAB

MAX_DRAFTS = 3
ALL_REQUESTS = [
    *REQUESTS,
    make_request("long", 4, ignore_eos=True, max_tokens=34),
    make_request("long_sampled", 6, ignore_eos=True, max_tokens=30, temperature=0.5, seed=4),
]


class Heads:
    """Models with their heads, loaded when they are first needed.

    Args:
        folder: Of checkpoints.
    """

    def __init__(self, folder):
        self._folder = folder

    @functools.cached_property
    def mtp(self):
        folder = self._folder / "mtp"
        make_mtp_checkpoint(folder, family="deepseek-v3", seed=1, vocab_size=VOCAB)
        model = load_model(folder, dtype="float32")
        return model, load_mtp_head(model, folder, encoder=KernelEncoder(platform=model.platform))

    @functools.cached_property
    def llama(self):
        folder = self._folder / "llama"
        make_llama_checkpoint(folder, seed=2, vocab_size=VOCAB, num_layers=2)
        return load_model(folder, dtype="float32")

    @functools.cached_property
    def eagle3(self):
        """The head has fewer KV heads than the model, so it has a KV cache group of its own."""
        folder, model = self._folder / "eagle3", self.llama
        write_eagle3_head(
            folder,
            vocab_size=VOCAB,
            draft_vocab_size=20,
            layer_ids=[1, 2],
            num_key_value_heads=1,
        )
        encoder = KernelEncoder(platform=model.platform)
        return model, load_eagle3_head(model, folder, encoder=encoder)

    @functools.cached_property
    def draft_model(self):
        folder = self._folder / "draft_model"
        make_llama_checkpoint(folder, seed=2, vocab_size=VOCAB, num_layers=1)
        draft_model = load_model(folder, dtype="float32")
        return self.llama, LoadedDraftModel.of_model(draft_model, self.llama)


class RandomPacer(DepthPacer):
    """Changes the number of drafts at random; 0 in half of the choices."""

    def __init__(self, max_drafts):
        super().__init__(max_drafts)
        self.rng = random.Random(0)

    def choose(self, num_reqs, chances):
        choices = [*range(1, MAX_DRAFTS + 1), *[0] * MAX_DRAFTS]
        self._choices.append(self.rng.choice(choices))
        return self.num_drafts


class ModelStepper:
    """Drafts of a draft model, from its logits for the whole text."""

    def __init__(self, model):
        self._stepper = PagedStepper(model)

    def drafts(self, token_ids, num_drafts):
        token_ids = list(token_ids)
        for _ in range(num_drafts):
            self._stepper.reset()
            logits = self._stepper.step({0: token_ids})[0]
            token_ids.append(int(logits[-1].argmax()))
        return token_ids[-num_drafts:]


@dataclasses.dataclass(frozen=True)
class Drafting:
    """A runner without drafts, and one with the same weights and a head.

    Attributes:
        pacer: Changes the number of drafts. None: there are always `MAX_DRAFTS`.
    """

    method: str
    batch_invariant: bool
    pacer: RandomPacer | None
    plain: ModelRunner
    runner: ModelRunner
    stepper: HeadStepper | ModelStepper


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    return Heads(tmp_path_factory.mktemp("heads"))


@pytest.fixture(scope="module")
def plain_runners():
    """Runners without drafts, which several heads share."""
    return {}


@pytest.fixture(
    scope="module",
    params=[
        # A program with experts takes several times as long to compile.
        pytest.param(("mtp", False, False), marks=pytest.mark.slow),
        pytest.param(("mtp", False, True), marks=pytest.mark.slow),
        # `test_burst_head_drafts.py` runs such an engine, whose bursts verify drafts too.
        pytest.param(("eagle3", False, True), marks=pytest.mark.slow),
        ("draft_model", False, False),
        pytest.param(("eagle3", False, False), marks=pytest.mark.slow),
        pytest.param(("draft_model", False, True), marks=pytest.mark.slow),
        pytest.param(("mtp", True, False), marks=pytest.mark.slow),
        pytest.param(("eagle3", True, True), marks=pytest.mark.slow),
        pytest.param(("draft_model", True, False), marks=pytest.mark.slow),
    ],
    ids=lambda param: "_".join(
        [param[0], *["invariant"] * param[1], "adapting" if param[2] else "always"]
    ),
)
def drafting(request, heads, plain_runners):
    method, batch_invariant, adapts = request.param
    model, head = getattr(heads, method)
    speculative = SpeculativeConfig(
        method=method,
        num_speculative_tokens=MAX_DRAFTS,
        model=None if method == "mtp" else "not read",
        adapts_drafts=adapts,
    )
    config = RunnerConfig(batch_invariant=batch_invariant, max_logprobs=-1)

    plain = (model.config.architecture, batch_invariant)
    if plain not in plain_runners:
        plain_runners[plain] = make_warm_runner(model, config, has_few_sizes=True).runner
    pacer = RandomPacer(MAX_DRAFTS) if adapts else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feature_list, "DepthPacer", lambda max_drafts, clock: pacer)
        config = dataclasses.replace(config, speculative_config=speculative)
        runner = make_warm_runner(model, config, head=head).runner
    if method == "draft_model":
        stepper = ModelStepper(head)
    else:
        stepper = HeadStepper(model, head, max_tokens=MAX_MODEL_LEN, width=MAX_MODEL_LEN)
    return Drafting(method, batch_invariant, pacer, plain_runners[plain], runner, stepper)


@pytest.fixture(scope="module")
def truth(drafting, compiler):
    """The answer of each request alone, in an engine without drafts."""
    return {
        request.request_id: run(drafting.plain, [request], compiler=compiler)[0][request.request_id]
        for request in ALL_REQUESTS
    }


def run_with_drafts(drafting, requests, compiler, **settings):
    return run(
        drafting.runner,
        requests,
        compiler=compiler,
        max_drafts=MAX_DRAFTS,
        use_eagle=drafting.method != "draft_model",
        **settings,
    )


def check_random_run(drafting, compiler, truth, seed):
    """Prefix hits, few blocks, chunked prompts, arrivals, async scheduling and bursts."""
    rng = random.Random(seed)
    can_burst = drafting.pacer is not None and not drafting.batch_invariant
    if drafting.pacer is not None:
        drafting.pacer.rng = rng
    few_blocks = 1 + 7 * len(drafting.runner.kv_cache_config.kv_cache_groups)
    requests = rng.sample(ALL_REQUESTS, rng.randint(1, len(ALL_REQUESTS)))
    num_arrivals = rng.randint(0, len(requests) - 1)
    answers, _ = run_with_drafts(
        drafting,
        requests,
        compiler,
        is_async=rng.random() < 0.5,
        num_blocks=rng.choice([None, few_blocks]),
        caching=rng.random() < 0.5,
        max_decode_burst=rng.choice([1, 8 if can_burst else 1]),
        arrivals=sorted(rng.choices(range(30), k=num_arrivals)),
    )
    for req_id, answer in answers.items():
        check_equal(answer, truth[req_id])
    assert drafting.runner.num_compiles_after_ready == 0


@pytest.mark.parametrize("seed", range(4))
def test_drafts_change_no_answer(drafting, compiler, truth, seed):
    check_random_run(drafting, compiler, truth, seed)


def test_drafts_are_those_of_a_head_without_a_paged_cache(drafting, compiler, monkeypatch):
    """With prompts of two steps, prefix hits, accepted and rejected drafts."""
    if drafting.pacer is not None:
        # Without a choice of 0, the head has keys and values of every token.
        monkeypatch.setattr(drafting.pacer, "choose", lambda num_reqs, chances: MAX_DRAFTS)
        monkeypatch.setattr(RandomPacer, "num_drafts", MAX_DRAFTS)
    take_drafts, drawn, found = DeviceStep._take_drafts, defaultdict(list), []

    def take(step, sampled_token_ids):
        drafts = take_drafts(step, sampled_token_ids)
        for req_id, token_ids in zip(step._built.req_ids, sampled_token_ids, strict=True):
            drawn[req_id] += token_ids
            if token_ids:
                found.append((req_id, list(drawn[req_id]), drafts[req_id]))
        return drafts

    monkeypatch.setattr(DeviceStep, "_take_drafts", take)
    prompt_ids = prompt(3, 20)
    requests = [
        make_request("whole", 20, ignore_eos=True),
        dataclasses.replace(make_request("hit", 20, ignore_eos=True), prompt_token_ids=prompt_ids),
        dataclasses.replace(
            make_request("late", 20, ignore_eos=True, temperature=0.7, seed=1),
            prompt_token_ids=[*prompt_ids[:16], 9, 8, 7, 6],
        ),
    ]
    run_with_drafts(drafting, requests, compiler, caching=True, arrivals=[6, 12])
    prompts = {request.request_id: request.prompt_token_ids for request in requests}
    num_right = num_drafts = num_whole = 0
    for req_id, token_ids, draft_ids in found:
        known = [*prompts[req_id], *token_ids]
        if len(known) + MAX_DRAFTS <= MAX_MODEL_LEN:
            wanted = drafting.stepper.drafts(known, MAX_DRAFTS)
            # After the step that admits a request, its last block may be full.
            assert draft_ids == wanted[: len(draft_ids)] and draft_ids
            num_whole += len(draft_ids) == MAX_DRAFTS
            following = drawn[req_id][len(token_ids) :]
            num_drafts += len(following[:1])
            num_right += following[:1] == draft_ids[:1]
    assert num_whole >= len(found) - 2 * len(requests)
    if drafting.method != "eagle3":
        assert 0.2 * num_drafts < num_right < num_drafts


@pytest.mark.slow
def test_drafts_change_no_answer_in_300_runs(drafting, compiler, truth):
    for seed in range(1000, 1300):
        check_random_run(drafting, compiler, truth, seed)
