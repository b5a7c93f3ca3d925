"""`LLM` with a head for multi-token prediction: transformers' tokens, and forks."""

import pytest

from paxkv import LLM, SamplingParams
from tests.engine_compilations import process_engine_compilations
from tests.small_engine import SETTINGS

NUM_TOKENS = 24
OWN_SETTINGS = SETTINGS | {"max_num_seqs": 4, "max_model_len": 80, "dtype": "float32"}
SPECULATIVE = {"method": "mtp", "num_speculative_tokens": 2}


@pytest.fixture(scope="module", params=["deepseek-v3", "glm4-moe"])
def checkpoint(request, tmp_path_factory):
    from tests.oracles import families

    folder = tmp_path_factory.mktemp("mtp")
    model, _ = families.make_mtp(request.param, folder, seed=5)
    return type(model), folder


@pytest.mark.slow
def test_answers_are_those_of_transformers_and_of_an_engine_without_drafts(checkpoint):
    import torch

    from tests.oracles import families

    model_class, folder = checkpoint
    theirs = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    prompts = families.prompts(7, families.VOCAB, [5, 23, 40])
    with process_engine_compilations():
        plain = LLM(str(folder), **OWN_SETTINGS)
        drafting = LLM(str(folder), **OWN_SETTINGS, speculative_config=SPECULATIVE)
    with plain, drafting:
        greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = drafting.generate(given, greedy, use_tqdm=False)
        for prompt, answer in zip(prompts, answers, strict=True):
            wanted = theirs.generate(
                torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, use_mtp=True
            )
            assert list(answer.outputs[0].token_ids) == wanted[0, len(prompt) :].tolist()
        sampled = SamplingParams(temperature=0.9, seed=3, n=4, max_tokens=NUM_TOKENS)
        found, expected = (
            [
                [list(completion.token_ids) for completion in answer.outputs]
                for answer in llm.generate(given, sampled, use_tqdm=False)
            ]
            for llm in (drafting, plain)
        )
        assert found == expected
        stats = drafting.get_stats()
        assert stats.num_draft_tokens > 0 and stats.num_compiles_after_ready == 0


@pytest.mark.slow
@pytest.mark.parametrize("in_bursts", [False, True])
def test_answers_of_mimo_are_those_of_qwen2(in_bursts, tmp_path):
    """transformers has no class for MiMo."""
    from tests.models.drafters.mimo_checkpoint import make_mimo
    from tests.oracles import families

    theirs, _ = make_mimo(tmp_path, seed=5)
    prompts = families.prompts(7, families.VOCAB, [5, 23, 40])
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    settings = OWN_SETTINGS | ({"max_decode_burst": 4} if in_bursts else {})
    speculative = SPECULATIVE | {"drafts_in_bursts": in_bursts, "adapts_drafts": False}
    with process_engine_compilations():
        llm = LLM(str(tmp_path), **settings, speculative_config=speculative)
    with llm:
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = llm.generate(given, greedy, use_tqdm=False)
        for prompt, answer in zip(prompts, answers, strict=True):
            wanted, _, _ = families.greedy(theirs, prompt, NUM_TOKENS)
            assert list(answer.outputs[0].token_ids) == wanted
        stats = llm.get_stats()
        assert stats.num_draft_tokens > 0 and stats.num_compiles_after_ready == 0
