"""`LLM(speculative_config=...)`: the answers of an engine without drafts, in fewer steps."""

import json
import random

import pytest

from models import CheckpointNotFoundError, ModelConfigError, UnsupportedModelError
from paxkv import LLM, SamplingParams, StructuredOutputsParams
from paxkv.entrypoints import build_drafter, build_model
from paxkv.entrypoints.build_scheduler import make_scheduler
from paxkv.errors import ConfigError
from paxkv.trace.replayer import replay
from paxkv.trace.trace_file import TraceReader
from tests.end_to_end.demo_prompts import PAXKV_QUESTIONS, SYSTEM_PROMPT
from tests.models.drafters.eagle3_checkpoints import write_eagle3_head
from tests.small_engine import CHECKPOINT, SETTINGS

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
    "adapts_drafts": False,
}
PROMPTS = (*PAXKV_QUESTIONS, SYSTEM_PROMPT[:80], "1, 2, 3, 1, 2, 3, 1, 2", "What is 2 + 2?")
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory):
    return tmp_path_factory.mktemp("drafts") / "trace.jsonl"


@pytest.fixture(scope="module")
def engines(demo_llm, trace_file):
    """An engine without drafts, and one with them that writes a trace."""
    settings = SETTINGS | {"max_num_batched_tokens": 8}  # so that steps have one width
    with LLM(**settings, speculative_config=NGRAM, trace_file=str(trace_file)) as drafting:
        yield demo_llm, drafting


def random_params(rng):
    """Any settings, of which some change the logits, and some end the answer."""
    fields = {
        "temperature": rng.choice([0.0, 0.0, 0.8]),
        "seed": rng.randrange(100),
        "max_tokens": rng.randint(1, 40),
        "ignore_eos": rng.random() < 0.7,
    }
    choices = {
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "logit_bias": {300: 4.0, 310: -4.0},
        "bad_words": ["the", " a"],
        "stop": ["e", "th"],
        "logprobs": 2,
        "prompt_logprobs": 1,
        "min_tokens": 1,
        "top_k": 5,
        "top_p": 0.7,
        "n": 4,
    }
    fields |= {name: choices[name] for name in rng.sample(sorted(choices), rng.randint(0, 4))}
    if rng.random() < 0.2:
        forms = [{"json": SCHEMA}, {"regex": "(ab ){3,9}c"}, {"choice": ["no", "yes, yes, yes"]}]
        fields["structured_outputs"] = StructuredOutputsParams(**rng.choice(forms))
        # The form may need these words.
        fields.pop("bad_words", None)
    if fields["temperature"] == 0.0:
        fields.pop("n", None)
    return SamplingParams(**fields)


def described(outputs):
    return [
        (completion.text, completion.token_ids, completion.finish_reason, completion.stop_reason)
        for output in outputs
        for completion in output.outputs
    ]


def tokens_of(logprobs):
    return None if logprobs is None else [sorted(position) for position in logprobs]


def test_answers_are_those_without_drafts(engines):
    """With prompts that are longer than a step, and requests that wait for their turn."""
    rng = random.Random(0)
    params = [random_params(rng) for _ in range(16)]
    # Copies in a prompt, and prompts that share a beginning.
    prompts = [rng.choice(PROMPTS) * rng.choice([1, 1, 2]) for _ in params]
    plain, drafting = (llm.generate(prompts, params, use_tqdm=False) for llm in engines)
    assert described(drafting) == described(plain)
    for found, wanted in zip(drafting, plain, strict=True):
        for completion, expected in zip(found.outputs, wanted.outputs, strict=True):
            assert tokens_of(completion.logprobs) == tokens_of(expected.logprobs)
    completions = [completion for output in drafting for completion in output.outputs]
    stats = engines[1].get_stats()
    # Only the engine counts drafts that come after the end of a stop string.
    assert 0 < sum(c.num_accepted_tokens for c in completions) <= stats.num_accepted_tokens
    assert sum(c.num_draft_tokens for c in completions) <= stats.num_draft_tokens
    assert stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_drafts <= stats.num_draft_tokens <= 3 * stats.num_drafts
    assert sum(stats.num_accepted_per_pos) == stats.num_accepted_tokens
    assert stats.num_compiles_after_ready == 0
    assert engines[0].get_stats().num_draft_tokens == 0


def test_copied_answer_needs_fewer_steps(engines):
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    plain, drafting = engines
    before = drafting.get_stats().num_steps
    # The demo model repeats itself.
    prompt = "the the the the"
    answer = described(drafting.generate(prompt, params, use_tqdm=False))
    # One for each token without drafts.
    assert drafting.get_stats().num_steps - before < 0.7 * 60
    assert answer == described(plain.generate(prompt, params, use_tqdm=False))


def test_trace_with_drafts_can_be_replayed(engines, trace_file):
    stats = engines[1].get_stats()
    summary = replay(TraceReader.open(trace_file), make_scheduler)
    assert summary.difference is None and summary.failure is None
    # The last calls may not be in the file yet.
    assert 0 < summary.num_accepted_tokens <= stats.num_accepted_tokens
    assert summary.num_accepted_tokens < summary.num_draft_tokens


def test_method_without_a_drafter_is_refused():
    with pytest.raises(ConfigError, match="'medusa' has no drafter yet"):
        LLM(speculative_config={"method": "medusa", "num_speculative_tokens": 1})


def test_model_without_a_head_is_refused():
    with pytest.raises(UnsupportedModelError, match="'mtp' does not support LlamaForCausalLM"):
        LLM(**SETTINGS, speculative_config={"method": "mtp", "num_speculative_tokens": 1})


@pytest.fixture
def no_weights(monkeypatch):
    """Fails the test if weights are loaded."""
    for module in (build_model, build_drafter):
        monkeypatch.setattr(module, "load_model", lambda *args, **kwargs: pytest.fail())


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
@pytest.mark.usefixtures("no_weights")
def test_missing_drafter_is_refused_before_weights_are_loaded(tmp_path, method):
    speculative = {"method": method, "num_speculative_tokens": 1, "model": str(tmp_path / "none")}
    with pytest.raises(CheckpointNotFoundError, match=r"^speculative_config: model .*none' is nei"):
        LLM(**SETTINGS, speculative_config=speculative)
    with pytest.raises(ModelConfigError, match="^speculative_config: .*config.json does not exist"):
        LLM(**SETTINGS, speculative_config=speculative | {"model": str(tmp_path)})


@pytest.mark.usefixtures("no_weights")
def test_drafter_with_another_vocabulary_is_refused_before_weights_are_loaded(tmp_path):
    config = json.loads((CHECKPOINT / "config.json").read_text()) | {"vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    speculative = {"num_speculative_tokens": 1, "model": str(tmp_path)}
    with pytest.raises(ModelConfigError, match="^speculative_config: .*512; the model has 768"):
        LLM(**SETTINGS, speculative_config=speculative | {"method": "draft_model"})
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(ModelConfigError, match="^speculative_config: .*512; the model has 768"):
        LLM(**SETTINGS, speculative_config=speculative | {"method": "eagle3"})


def test_access_token_is_for_the_drafter_too(monkeypatch):
    found = []

    def resolve(model, *, token=None, **kwargs):
        found.append((model, token))
        raise CheckpointNotFoundError("gated")

    monkeypatch.setattr(build_drafter, "resolve_model_folder", resolve)
    speculative = {"method": "eagle3", "num_speculative_tokens": 1, "model": "some/head"}
    with pytest.raises(CheckpointNotFoundError, match="^speculative_config: gated"):
        LLM(**SETTINGS, hf_token="secret", speculative_config=speculative)
    assert found == [("some/head", "secret")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "adapts"), [("draft_model", False), ("eagle3", False), ("eagle3", True)]
)
def test_drafter_from_a_folder_changes_no_answer(engines, tmp_path, method, adapts):
    folder = CHECKPOINT
    if method == "eagle3":
        folder = tmp_path
        config = json.loads((CHECKPOINT / "config.json").read_text())
        write_eagle3_head(
            folder,
            vocab_size=config["vocab_size"],
            draft_vocab_size=100,
            layer_ids=[1, 2, 3],
            hidden_size=config["hidden_size"],
            head_dim=config["head_dim"],
        )
    speculative = {
        "method": method,
        "num_speculative_tokens": 3,
        "model": str(folder),
        "adapts_drafts": adapts,
    }
    greedy = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    params = [
        greedy,
        SamplingParams(temperature=0.8, seed=3, n=4, max_tokens=20),
        SamplingParams(
            temperature=0.0, max_tokens=20, structured_outputs=StructuredOutputsParams(json=SCHEMA)
        ),
    ]
    with LLM(**SETTINGS, speculative_config=speculative) as drafting:
        found, wanted = (
            described(llm.generate(PROMPTS[:3], params, use_tqdm=False))
            for llm in (drafting, engines[0])
        )
        assert found == wanted
        before = drafting.get_stats()
        drafting.generate(PROMPTS[0], greedy, use_tqdm=False)
        stats = drafting.get_stats()
    assert stats.num_compiles_after_ready == 0
    if not adapts:
        assert before.num_draft_tokens > 0
    if method == "draft_model":
        # The model is its own draft model, so it is right about the most likely token. After the
        # prompt, each step draws 4 tokens.
        assert stats.num_steps - before.num_steps <= 10
