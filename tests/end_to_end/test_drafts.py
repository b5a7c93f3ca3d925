"""A step verifies drafts of some requests: no answer changes, and fewer steps are needed."""

import json
import random

import jax
import numpy as np
import pytest
import tokenizers

from paxkv.config.runner_config import RunnerConfig
from paxkv.config.sampling_params import SamplingParams
from paxkv.config.structured_outputs_params import StructuredOutputsParams
from paxkv.contracts.engine_request import EngineRequest
from paxkv.runner import model_runner
from paxkv.runner.features.feature_list import make_features
from paxkv.structured_output.grammar_compiler import GrammarCompiler
from tests.end_to_end.engine_runs import run
from tests.paxkv.runner.features.oracle_drafter import OracleDrafter
from tests.paxkv.runner.features.test_prompt_logprobs import prompt
from tests.paxkv.runner.shared_runners import make_warm_runner
from tests.paxkv.runner.tiny_model import VOCAB, TinyModel

EOS = 1
# Of which the tokens from 2 on are the texts.
CHARACTERS = '{}[]",:. 0123456789abcdefghijklmnopqrstuvwxyz-_'[: VOCAB - 2]


@pytest.fixture(scope="module", params=[False, True], ids=["steps", "batch_invariant"])
def drafting(request):
    """A warm runner with an `OracleDrafter`."""
    drafter = OracleDrafter()
    config = RunnerConfig(batch_invariant=request.param, max_logprobs=-1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "make_features", lambda *args: (*make_features(*args), drafter))
        warm = make_warm_runner(TinyModel(seed=2), config)
    return warm.runner, drafter


@pytest.fixture(scope="module")
def compiler():
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={"<pad>": 0, "<eos>": EOS}
            | {char.replace(" ", "Ġ"): 2 + idx for idx, char in enumerate(CHARACTERS)},
            merges=[],
        )
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<pad>", "<eos>"])
    return GrammarCompiler(backend.to_str(), vocab_size=VOCAB, eos_token_ids=[EOS])


def make_request(req_id, length, **params):
    bad_words = params.pop("bad_words_token_ids", ())
    ends = params.get("structured_outputs") is not None
    return EngineRequest(
        request_id=req_id,
        prompt_token_ids=prompt(length, length),
        sampling_params=SamplingParams(**{"max_tokens": 16, "temperature": 0.0} | params),
        eos_token_ids=(EOS,),
        bad_words_token_ids=bad_words,
        needs_grammar=ends,
    )


SAMPLED = {"temperature": 1.0, "seed": 5}
REQUESTS = [
    make_request("greedy", 5, ignore_eos=True),
    make_request("sampled", 9, **SAMPLED, top_k=20, logprobs=2),
    make_request("penalties", 7, **SAMPLED, repetition_penalty=1.3, frequency_penalty=0.4),
    make_request("presence", 4, presence_penalty=1.5, logprobs=1),
    make_request("bias", 6, **SAMPLED, logit_bias={7: 3.0, 9: -2.0}, top_p=0.9),
    make_request("allowed", 8, temperature=1.0, seed=1, allowed_token_ids=[4, 5, 6, 7, 8]),
    make_request(
        "bad_words",
        3,
        temperature=1.0,
        seed=2,
        allowed_token_ids=[4, 5, 6],
        bad_words_token_ids=((4, 5), (6, 6, 4), (5, 5)),
    ),
    make_request("min_tokens", 10, **SAMPLED, min_tokens=6, stop_token_ids=list(range(25))),
    make_request("stop", 11, **SAMPLED, stop_token_ids=[35, 46]),
    make_request("wide", 12, **SAMPLED, logprobs=-1),
    make_request("prompt_logprobs", 13, logprobs=0, prompt_logprobs=2),
    make_request("length", 20, **SAMPLED, max_tokens=20),
    make_request("one", 6, max_tokens=1),
    make_request(
        "choice", 5, structured_outputs=StructuredOutputsParams(choice=["no", "yesyes", "yesno"])
    ),
    make_request(
        "regex",
        6,
        **SAMPLED,
        logprobs=1,
        structured_outputs=StructuredOutputsParams(regex="[a-f]{3}[0-9]+"),
    ),
    make_request(
        "json",
        4,
        **SAMPLED,
        max_tokens=30,
        repetition_penalty=1.1,
        structured_outputs=StructuredOutputsParams(
            json={"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
        ),
    ),
    make_request(
        "dead_end",
        5,
        allowed_token_ids=[2 + CHARACTERS.index(char) for char in "ab"],
        structured_outputs=StructuredOutputsParams(regex="ab[0-9]"),
    ),
]


def run_with_drafts(runner, requests, compiler, **settings):
    return run(runner, requests, compiler=compiler, max_drafts=OracleDrafter.max_drafts, **settings)


@pytest.fixture(scope="module")
def truth(drafting, compiler):
    """The answer of each request alone, without drafts."""
    runner, drafter = drafting
    drafter.truth = {}
    return {
        request.request_id: run_with_drafts(runner, [request], compiler)[0][request.request_id]
        for request in REQUESTS
    }


def check_equal(found, expected):
    assert found.token_ids == expected.token_ids
    assert (found.finish_reason, found.stop_reason) == (
        expected.finish_reason,
        expected.stop_reason,
    )
    for name in ("logprobs", "prompt_logprobs"):
        rows, wanted = getattr(found, name), getattr(expected, name)
        assert (rows is None) == (wanted is None)
        for row, wanted_row in zip(rows or (), wanted or (), strict=True):
            assert row.token_rank == wanted_row.token_rank
            np.testing.assert_allclose(row.token_logprob, wanted_row.token_logprob, atol=1e-3)
            np.testing.assert_allclose(row.top_logprobs, wanted_row.top_logprobs, atol=1e-3)


def test_requests_end_as_they_are_meant_to(truth):
    """So that the tests below compare with answers of every kind."""
    reasons = {req_id: answer.finish_reason for req_id, answer in truth.items()}
    assert reasons["choice"] == reasons["json"] == reasons["stop"] == "stop"
    assert reasons["dead_end"] == "error" and reasons["greedy"] == "length"
    assert json.loads("".join(CHARACTERS[i - 2] for i in truth["json"].token_ids if i > 1))
    assert 6 <= len(truth["min_tokens"].token_ids) < 16


@pytest.mark.parametrize("is_async", [False, True])
def test_right_drafts_need_a_quarter_of_the_steps(drafting, compiler, truth, is_async):
    runner, drafter = drafting
    drafter.truth = {req_id: answer.token_ids for req_id, answer in truth.items()}
    drafter.wrong_rate, request = 0.0, REQUESTS[0]
    drafter.num_drawn.clear()
    with jax.transfer_guard("disallow"):
        answers, _ = run_with_drafts(runner, [request], compiler, is_async=is_async)
    check_equal(answers["greedy"], truth["greedy"])
    # The prompt's step has no drafts; the last step may draw no token after max_tokens.
    assert drafter.num_drawn == [1, 4, 4, 4, 3]
    assert runner.num_compiles_after_ready == 0


@pytest.mark.parametrize("seed", range(6))
def test_drafts_change_no_answer(drafting, compiler, truth, seed):
    """Right and wrong drafts; one request or several; few blocks; prefix hits; arrivals."""
    runner, drafter = drafting
    rng = random.Random(seed)
    drafter.wrong_rate = (0.0, 0.3, 1.0)[seed % 3]
    # Some requests have no drafts.
    drafter.truth = {
        req_id: answer.token_ids for req_id, answer in truth.items() if rng.random() < 0.8
    }
    requests = rng.sample(REQUESTS, len(REQUESTS))
    answers, _ = run_with_drafts(
        runner,
        requests,
        compiler,
        is_async=seed % 2 == 1,
        num_blocks=rng.choice([None, 8]),
        caching=rng.random() < 0.5,
        arrivals=sorted(rng.choices(range(30), k=len(requests) - 2)),
    )
    for req_id, answer in answers.items():
        check_equal(answer, truth[req_id])
    assert runner.num_compiles_after_ready == 0
