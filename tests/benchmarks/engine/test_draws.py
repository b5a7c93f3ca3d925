"""Every case is measured in turn, and the tokenizer has a token for every id."""

import json
from types import SimpleNamespace

import pytest
import tokenizers

from benchmarks.engine import draws


class FakeLLM:
    """Answers at once, with as many tokens as were asked for."""

    num_missing = 0

    def __init__(self, *args, **settings):
        self.asked = []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def generate(self, prompts, params, *, use_tqdm):
        self.asked.append((len(prompts), params.max_tokens))
        answer = SimpleNamespace(token_ids=[0] * (params.max_tokens - self.num_missing))
        return [SimpleNamespace(outputs=[answer]) for _ in prompts]


def test_every_token_id_is_a_byte_or_a_word(tmp_path):
    draws.write_tokenizer(tmp_path, 1000)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert backend.get_vocab_size() == 1000
    assert backend.decode(backend.encode("naïve {}").ids) == "naïve {}"
    assert backend.decode([500]).endswith("-")


def test_each_case_has_as_many_values_as_repetitions():
    llm = FakeLLM()
    found = draws.measure(llm, num_requests=3, num_repetitions=2, answer_lens=(4, 6))
    assert found.keys() == draws.CASES.keys()
    assert {len(values) for values in found.values()} == {2}
    # A warm-up, then two repetitions, each of a short and a long answer.
    assert llm.asked == [(3, 4), (3, 6)] * len(draws.CASES) * 3


def test_an_answer_that_ends_early_is_an_error():
    llm = FakeLLM()
    llm.num_missing = 1
    with pytest.raises(RuntimeError, match=r"greedy: answers have \{3\} tokens, expected 4"):
        draws.measure(llm, num_requests=1, num_repetitions=1, answer_lens=(4, 6))


def test_rows_are_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(draws, "LLM", FakeLLM)
    monkeypatch.setattr(draws, "write_shape", lambda folder, shape: folder)
    monkeypatch.setattr(draws, "write_tokenizer", lambda folder, vocab_size: None)
    out = tmp_path / "rows.jsonl"
    assert draws.main(["--requests", "2", "--repetitions", "1", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["metric"] for row in rows} == {"step_ms", "times_greedy"}
    assert len(rows) == 2 * len(draws.CASES)
    assert "grammar shape=qwen3-0.6b requests=2" in capsys.readouterr().out
