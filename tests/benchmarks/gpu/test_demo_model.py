"""The demo model knows every answer that is asked for on a GPU; other answers are found."""

import pytest
from tokenizers import Tokenizer

from benchmarks.gpu import demo_model
from benchmarks.gpu.device_engine import DeviceRun
from models.demo.checkpoint import load_checkpoint
from models.demo.evaluate import num_exact_answers


# In the normal run, `tests/models/demo/test_checkpoint.py` checks two other answers.
@pytest.mark.slow
def test_cpu_answers_every_question_exactly() -> None:
    model, tokenizer = load_checkpoint(demo_model.CHECKPOINT)
    conversations = demo_model.conversations()
    assert num_exact_answers(model, tokenizer, conversations) == len(conversations) == 24


def test_requests_are_the_prompt_and_as_long_as_the_answer() -> None:
    workload, answers = demo_model.requests_of(demo_model.conversations())
    request = workload.requests[1]
    tokenizer = Tokenizer.from_file(str(demo_model.CHECKPOINT / "tokenizer.json"))
    prompt = tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
    assert prompt.startswith("<|im_start|>system") and prompt.endswith("<|im_start|>assistant\n")
    answer = tokenizer.decode(answers[1], skip_special_tokens=False)
    assert " = " in answer and answer.endswith("<|im_end|>")
    assert request.num_output_tokens == len(answers[1])
    # They fit into the engine.
    assert max(r.num_tokens for r in workload.requests) <= demo_model.SIZES.max_model_len
    rehearsed = demo_model.REHEARSED_SIZES
    assert len(workload.requests[0].prompt_token_ids) <= rehearsed.max_num_batched_tokens


@pytest.mark.parametrize(("chosen", "num_wrong"), [(None, 0), (None, 2), ("xla", 0)])
def test_wrong_answers_and_rejected_kernels_are_found(chosen, num_wrong, monkeypatch) -> None:
    class FakeEngine:
        """Answers right, except for the last token of the first answers."""

        def __init__(self, model, sizes, *, implementation: str) -> None:
            assert implementation == "default"
            self.chosen = chosen

        def run(self, workload) -> DeviceRun:
            _, answers = demo_model.requests_of(demo_model.conversations())
            for answer in answers[:num_wrong]:
                answer[-1] += 1
            return DeviceRun(steps=[], token_ids=answers)

    monkeypatch.setattr(demo_model, "DeviceEngine", FakeEngine)
    measured = demo_model.check_answers("default", "bfloat16", False, False)
    assert measured.figures == {"wrong_answers": [num_wrong]}
    assert [finding.is_right for finding in measured.findings] == [num_wrong == 0, chosen is None]
    assert ("first_difference" in measured.details) == (num_wrong > 0)
