"""Requests are the same at every call, and figures are ratios of equal answers."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file

from benchmarks.command_line import BenchmarkError
from benchmarks.engine import drafts
from benchmarks.random_checkpoint import MODEL_SHAPES
from paxkv.contracts.engine_output import SchedulerStats


class FakeLLM:
    """Answers at once. With drafts it verifies 4 of each request, and accepts 3."""

    def __init__(self, *args, speculative_config=None, **settings):
        self.has_drafts = speculative_config is not None
        self.num_requests = 0

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def get_stats(self):
        num_drafts = self.num_requests if self.has_drafts else 0
        return SchedulerStats(
            num_drafts=num_drafts,
            num_draft_tokens=4 * num_drafts,
            num_accepted_tokens=3 * num_drafts,
        )

    def generate(self, prompts, params, *, use_tqdm):
        self.num_requests += len(prompts)
        return [
            SimpleNamespace(outputs=[SimpleNamespace(token_ids=prompt[: of_one.max_tokens])])
            for prompt, of_one in zip(prompts, params, strict=True)
        ]


def run(wall_s=1.0, cpu_s=1.0, token_ids=((1, 2),), **counts):
    numbers = {"num_steps": 0, "num_drafts": 0, "num_accepted": 0} | counts
    return drafts.Run(token_ids=list(token_ids), wall_s=wall_s, cpu_s=cpu_s, **numbers)


def test_figures_compare_both_engines():
    drafting = run(1.0, 2.0, num_steps=5, num_drafts=20, num_accepted=15)
    assert drafts.compare(run(3.0, 5.0), drafting) == {
        "times_tokens_per_s": 3.0,
        "times_tokens_per_cpu_s": 2.5,
        "acceptance_percent": 75.0,
        "tokens_per_step": 4.0,
    }
    assert drafts.compare(run(), run())["tokens_per_step"] == 1.0


def test_other_answers_are_an_error():
    with pytest.raises(BenchmarkError, match="answers with drafts differ"):
        drafts.compare(run(), run(token_ids=((1, 3),)))


def test_engines_begin_in_turn_and_the_first_repetition_does_not_count(monkeypatch):
    cpu_s = {"plain": [100.0, 2.0, 4.0], "drafting": [1.0, 1.0, 1.0]}
    order = []

    def run_engine(llm, requests, num_requests):
        order.append(llm)
        return run(cpu_s=cpu_s[llm].pop(0))

    monkeypatch.setattr(drafts, "run", run_engine)
    found = drafts.measure("plain", "drafting", [], num_requests=1, num_repetitions=2)
    assert order == ["drafting", "plain", "plain", "drafting", "drafting", "plain"]
    assert found["times_tokens_per_cpu_s"] == [2.0, 4.0]
    assert found["total_times_tokens_per_cpu_s"] == [3.0]


@pytest.mark.parametrize("workload", drafts.TRAFFIC)
def test_requests_are_the_same_at_every_call(workload):
    traffic = drafts.TRAFFIC[workload]
    vocab_size = drafts.SHAPE.vocab_size
    requests = traffic.requests(5, vocab_size)
    assert requests == traffic.requests(5, vocab_size)
    for prompt, params in requests:
        assert params.max_tokens <= drafts.MAX_OUTPUT_TOKENS
        if traffic.checkpoint != "demo":
            assert len(prompt) == drafts.NUM_PROMPT_TOKENS
            assert 0 <= min(prompt) and max(prompt) < vocab_size
            assert set(prompt) <= set(params.allowed_token_ids or prompt)


def test_questions_are_answered_in_groups():
    requests = drafts.TRAFFIC["demo_eagle3"].requests(8, 768)
    llm = FakeLLM(speculative_config={})
    found = drafts.run(llm, requests, 8)
    assert len(requests) == llm.num_requests == len(found.token_ids) == drafts.NUM_QUESTIONS
    assert found.num_steps == drafts.NUM_QUESTIONS


def test_demo_draft_has_two_layers(tmp_path):
    drafts.write_demo_draft(tmp_path / "draft")
    names = load_file(tmp_path / "draft" / "model.safetensors").keys()
    layers = {int(name.split(".")[2]) for name in names if ".layers." in name}
    assert layers == {0, 1}
    assert json.loads((tmp_path / "draft" / "config.json").read_text())["num_hidden_layers"] == 2
    assert (tmp_path / "draft" / "tokenizer.json").exists()


def test_copying_model_has_cycles(tmp_path):
    weights = load_file(
        drafts.write_copying_checkpoint(tmp_path, MODEL_SHAPES["tiny"]) / "model.safetensors"
    )
    embeddings, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    # Without attention and MLPs, the hidden state of a token is its embedding.
    assert all(not weights[name].any() for name in weights if name.endswith("down_proj.weight"))
    next_ids = np.argmax(embeddings @ head.T, axis=1)
    last = drafts.CYCLE_LEN - 1
    assert next_ids[:last].tolist() == list(range(1, drafts.CYCLE_LEN))
    assert next_ids[last] == 0


def test_rows_are_written(tmp_path, monkeypatch, capsys):
    def write(folder):
        for traffic in drafts.TRAFFIC.values():
            (folder / traffic.checkpoint).mkdir(exist_ok=True)
            (folder / traffic.checkpoint / "config.json").write_text('{"vocab_size": 8192}')

    monkeypatch.setattr(drafts, "LLM", FakeLLM)
    monkeypatch.setattr(drafts, "write_checkpoints", write)
    out = tmp_path / "rows.jsonl"
    arguments = ["--requests", "1", "8", "--repetitions", "2", "--out", str(out)]
    assert drafts.main(arguments) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == len(drafts.TRAFFIC) * 2 * len(drafts.METRICS)
    assert rows[3]["case"] == "copy requests=1" and rows[3]["metric"] == "acceptance_percent"
    assert rows[3]["median"] == 75.0
    assert "| copy requests=1 " in capsys.readouterr().out
