"""Answers of a model with states do not depend on what else the engine does."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import load_model
from paxkv import LLM, BeamSearchParams, SamplingParams
from paxkv.runner.shapes import step_buckets
from tests.end_to_end.parity import make_checkpoint
from tests.oracles import families
from tests.oracles.paged_stepper import PagedStepper

MAX_TOKENS = 8
# Difference over the norm of the logits: the least, below which nothing was rounded, and the
# largest, as in docs/guide/tuning.md.
ERRORS = {"float16": (1e-5, 0.002), "bfloat16": (1e-4, 0.01)}


def greedy(**fields: object) -> SamplingParams:
    """Draws the best token; greedy requests have no copies."""
    return SamplingParams(temperature=1.0, top_k=1, max_tokens=MAX_TOKENS, **fields)


def test_copies_beams_and_ends_within_bursts_leave_other_answers_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With one program of bursts, less is compiled.
    monkeypatch.setattr(step_buckets, "decode_buckets", lambda max_num_seqs: (max_num_seqs,))
    make_checkpoint("mamba2", tmp_path, 1, is_shallow=True, is_sharp=True)
    prompts = [
        {"prompt_token_ids": prompt}
        for prompt in families.prompts(1, families.VOCAB, [9, 23, 5, 14])
    ]
    # Room for four slots, so that requests wait, and take slots that others have just freed.
    with LLM(
        str(tmp_path),
        dtype="float32",
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        num_gpu_blocks_override=5,
        enable_compilation_cache=False,
    ) as llm:
        alone = [
            list(llm.generate([prompt], greedy(ignore_eos=True))[0].outputs[0].token_ids)
            for prompt in prompts
        ]
        # The second request ends in the middle of a burst, while others go on.
        stop = alone[1][3]
        end = alone[1].index(stop) + 1
        params = [
            greedy(ignore_eos=True),
            greedy(stop_token_ids=[stop], ignore_eos=True),
            greedy(ignore_eos=True, n=4),
            greedy(ignore_eos=True),
        ]
        outputs = llm.generate(prompts, params)
        for prompt_idx, output in enumerate(outputs):
            wanted = alone[1][:end] if prompt_idx == 1 else alone[prompt_idx]
            assert [list(copy.token_ids) for copy in output.outputs] == [wanted] * len(
                output.outputs
            )
        assert [len(output.outputs) for output in outputs] == [1, 1, 4, 1]
        # The best of one beam is the greedy answer.
        (beams,) = llm.beam_search(
            [prompts[0]], BeamSearchParams(beam_width=1, max_tokens=MAX_TOKENS, ignore_eos=True)
        )
        num_prompt_tokens = len(prompts[0]["prompt_token_ids"])
        assert list(beams.sequences[0].tokens)[num_prompt_tokens:] == alone[0]


# `test_state_format.py` stores arrays in both dtypes.
@pytest.mark.parametrize("dtype", [pytest.param("float16", marks=pytest.mark.slow), "bfloat16"])
@pytest.mark.parametrize("family", ["mamba2", pytest.param("qwen3-next", marks=pytest.mark.slow)])
def test_logits_of_states_with_16_bits_are_as_near_as_stated(
    family: str, dtype: str, tmp_path: Path
) -> None:
    make_checkpoint(family, tmp_path, 1, is_shallow=True, is_sharp=False)
    model = load_model(tmp_path, dtype="float32")
    steppers = PagedStepper(model), PagedStepper(model, state_dtype=dtype)
    least_error, worst_error = ERRORS[dtype]
    prompts = families.prompts(1, families.VOCAB, [9, 14])
    errors = []
    # The first tokens start from zeros; all later ones read states.
    for chunk in (dict(enumerate(prompts)), {0: [5], 1: [7, 8]}, {0: [9], 1: [3]}):
        truth, got = (stepper.step(chunk) for stepper in steppers)
        errors.append(
            [np.linalg.norm(got[row] - truth[row]) / np.linalg.norm(truth[row]) for row in chunk]
        )
    assert max(errors[0]) < 1e-5
    assert all(least_error < error < worst_error for each in errors[1:] for error in each)
