"""An engine whose kernels lie in panels, as on one core, and in loops, makes the right tokens."""

import jax
import numpy as np
import pytest

from models import LoadedModel
from models.platforms import CPU
from paxkv import LLM, SamplingParams
from paxkv.entrypoints import build_model
from tests.oracles.dense_model import dense_logits
from tests.oracles.make_checkpoint import write_random_checkpoint

SETTINGS = {
    "max_model_len": 64,
    "num_gpu_blocks_override": 24,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
}
VOCAB_SIZE = 1024
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_random_checkpoint(
        tmp_path_factory.mktemp("model"),
        num_layers=1,
        hidden_size=512,
        intermediate_size=1024,
        vocab_size=VOCAB_SIZE,
        num_q_heads=8,
        num_kv_heads=4,
        head_dim=64,
    )


# Of the layer q, o, gate, up and down, and the head; with panels of 512 only those of 1,024,
# and none with AVX-512 but not avx512_fp16.
# In the normal run, `test_build_model.py` checks the width of each platform, and
# `stored_kernels/test_column_panels.py` compares the logits.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("has", "num_panelled"),
    [(["avx2"], 6), (["avx2", "avx512f"], 0), (["avx2", "avx512f", "avx512_fp16"], 3)],
)
def test_tokens_are_the_same_as_with_whole_kernels(checkpoint, monkeypatch, has, num_panelled):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, VOCAB_SIZE, n).tolist() for n in (3, 20, 40)]
    loaded, load_model = [], build_model.load_model

    def load_and_keep(*args: object, **settings: object) -> LoadedModel:
        loaded.append(load_model(*args, **settings))
        return loaded[-1]

    platform = CPU(num_threads=1, instruction_sets=frozenset(has))
    monkeypatch.setattr(build_model, "default_platform", lambda: platform)
    monkeypatch.setattr(build_model, "load_model", load_and_keep)
    with LLM(str(checkpoint), enable_compilation_cache=False, **SETTINGS) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        token_ids = output.outputs[0].token_ids
        # In float64, without a cache: after each token, the next is the likeliest.
        logits_np = dense_logits(checkpoint, prompt + token_ids[:-1])[len(prompt) - 1 :]
        assert token_ids == logits_np.argmax(-1).tolist()
    (model,) = loaded
    names = {name.rpartition(".")[0] for name in model.param_names if name[-1].isdecimal()}
    assert len(names) == (num_panelled if jax.default_backend() == "cpu" else 0)
