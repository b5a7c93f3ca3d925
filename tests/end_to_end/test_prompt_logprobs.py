"""Log-probabilities of prompts are those of transformers, whatever runs beside; and penalties of n
completions are each one's own.
"""

import random

import numpy as np
import pytest

from paxkv.config.sampling_params import SamplingParams
from tests.end_to_end.checked_engine import (
    VOCAB_SIZE,
    CheckedCore,
    EngineSettings,
    completions_alone,
    make_llm,
)

# Of one token, of less than a step, of several.
LENGTHS = (1, 5, 16, 30)
PROMPTS = [
    [random.Random(i).randrange(VOCAB_SIZE) for _ in range(n)] for i, n in enumerate(LENGTHS)
]
SETTINGS = [
    EngineSettings(),
    EngineSettings(is_ahead=True, enable_prefix_caching=True),
    EngineSettings(is_ahead=True, num_blocks=13, max_num_batched_tokens=5),
]
NUM_LOGPROBS = 4


@pytest.fixture(scope="module")
def expected(tiny_checkpoint):
    """Of each prompt, f64[num_tokens, vocab]: log-probabilities of what follows each token."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    with torch.no_grad():
        return [
            torch.log_softmax(model(torch.tensor([prompt])).logits[0].double(), -1).numpy()
            for prompt in PROMPTS
        ]


def check(prompt, found, true_np):
    first, *others = found
    assert first is None and len(others) == len(prompt) - 1
    for token_id, row_np, entry in zip(prompt[1:], true_np, others, strict=False):
        best = np.argsort(-row_np)[:NUM_LOGPROBS].tolist()
        assert list(entry) == list(dict.fromkeys([token_id, *best]))
        for some_id, logprob in entry.items():
            assert logprob.rank == (row_np > row_np[some_id]).sum() + 1
            np.testing.assert_allclose(logprob.logprob, row_np[some_id], atol=1e-4)


@pytest.mark.parametrize("settings", SETTINGS, ids=["plain", "ahead", "tiny_pool"])
def test_logprobs_of_prompts_equal_transformers(tiny_runner, expected, settings, monkeypatch):
    core = CheckedCore(tiny_runner, settings)
    llm = make_llm(monkeypatch, core)
    asks = [
        SamplingParams(n=n, seed=3, max_tokens=14, prompt_logprobs=NUM_LOGPROBS)
        for n in (1, 3, 1, 2)
    ]
    # The same prompts without it, at the same time, and with what the cache has of them.
    plain = [SamplingParams(seed=3, max_tokens=9)] * len(PROMPTS)
    for _ in range(2):
        outputs = llm.generate([*PROMPTS, *PROMPTS], [*asks, *plain], use_tqdm=False)
        asked, others = outputs[: len(PROMPTS)], outputs[len(PROMPTS) :]
        for prompt, output, true_np in zip(PROMPTS, asked, expected, strict=True):
            check(prompt, output.prompt_logprobs, true_np)
        for output, other in zip(asked, others, strict=True):
            assert other.prompt_logprobs is None
            # Child 0 has the seed itself.
            assert output.outputs[0].token_ids[:9] == other.outputs[0].token_ids
    llm.close()
    assert (core.num_preemptions > 0) == (settings.num_blocks == 13)


@pytest.mark.parametrize("settings", SETTINGS, ids=["plain", "ahead", "tiny_pool"])
def test_each_of_n_completions_has_penalties_of_its_own(tiny_runner, settings, monkeypatch):
    params = SamplingParams(
        n=3,
        seed=11,
        temperature=0.7,
        max_tokens=14,
        presence_penalty=1.0,
        frequency_penalty=0.5,
        repetition_penalty=1.2,
        logit_bias={3: 1.5},
        min_tokens=4,
        stop_token_ids=list(range(0, VOCAB_SIZE, 12)),
    )
    alone = [completions_alone(tiny_runner, prompt, params) for prompt in PROMPTS]
    llm = make_llm(monkeypatch, CheckedCore(tiny_runner, settings))
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    llm.close()
    found = [[completion.token_ids for completion in output.outputs] for output in outputs]
    assert found == alone
    lengths = {len(tokens) for completions in found for tokens in completions}
    assert min(lengths) > 4 and len(lengths) > 3
