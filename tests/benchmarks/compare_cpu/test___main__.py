"""GGUF files have the checkpoint's weights, and figures come from the times of answers."""

import json
import sys
import time

import numpy as np
import pytest

from benchmarks.command_line import BenchmarkError
from benchmarks.compare_cpu import __main__ as compare_cpu
from benchmarks.compare_cpu.gguf_file import write_gguf
from benchmarks.compare_cpu.greedy_model import GreedyModel, first_tokens, measure
from benchmarks.startup import shapes
from benchmarks.startup.shapes import SHAPES, write_shape
from models.loading.load_model import load_model


class ClockedModel(GreedyModel):
    """Moves a clock by 1 s per answer, and by 2 ms per step and stream; keeps all prompts."""

    def __init__(self, num_missing: int = 0) -> None:
        self.now_s, self._num_missing, self.prompts = 0.0, num_missing, []

    def generate(self, prompts, num_tokens):
        self.prompts += prompts
        self.now_s += 1 + 0.002 * num_tokens * len(prompts)
        return [[prompt[0]] * (num_tokens - self._num_missing) for prompt in prompts]

    def versions(self):
        return {"clocked": "1"}


def test_gguf_files_hold_the_checkpoint(tmp_path, monkeypatch):
    pytest.importorskip("gguf", reason="needs the extra `gguf`")
    small = {**SHAPES["qwen3-0.6b"], "vocab_size": 512, "num_hidden_layers": 1}
    monkeypatch.setattr(shapes, "SHAPES", {"small": small})
    folder = write_shape(tmp_path / "model", "small")
    write_gguf(folder, tmp_path / "F32.gguf", "F32")
    wanted, got = load_model(folder), load_model(tmp_path / "F32.gguf")
    assert got.param_names == wanted.param_names
    for name, one, other in zip(got.param_names, got.params, wanted.params, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other), err_msg=name)
    write_gguf(folder, tmp_path / "Q8_0.gguf", "Q8_0")
    rounded = load_model(tmp_path / "Q8_0.gguf")
    for one, other in zip(rounded.params, wanted.params, strict=True):
        assert np.abs(np.asarray(one) - np.asarray(other)).max() < 0.02


def test_step_times_are_those_of_steps_alone(monkeypatch):
    model = ClockedModel()
    monkeypatch.setattr(time, "perf_counter", lambda: model.now_s)
    monkeypatch.setattr(time, "process_time", lambda: 2 * model.now_s)
    figures = measure(model, vocab_size=1000, num_repetitions=2)
    wanted = {
        "prompt_tokens_per_s": 128 / 1.002,
        "prompt_cpu_ms": 2004,
        "step_ms_1": 2,
        "step_cpu_ms_1": 4,
        "step_ms_8": 16,
        "step_cpu_ms_8": 32,
    }
    assert figures == {name: [pytest.approx(value)] * 2 for name, value in wanted.items()}
    firsts = [prompt[0] for prompt in model.prompts]
    assert len(set(firsts)) == len(firsts)
    assert set(map(len, model.prompts)) == {16, 128}
    assert len(first_tokens(model, vocab_size=1000)) == 8


def test_an_answer_that_is_too_short_is_an_error():
    with pytest.raises(ValueError, match=r"answers have \[0\] tokens, not 1"):
        measure(ClockedModel(num_missing=1), vocab_size=1000, num_repetitions=1)


def test_a_program_that_is_not_installed_is_named(tmp_path):
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\necho \"ModuleNotFoundError: No module named 'llama_cpp'\" >&2\nexit 1"
    )
    python.chmod(0o700)
    with pytest.raises(BenchmarkError, match=r"llama-cpp-python is not installed .*'llama_cpp'"):
        compare_cpu.main(["--subjects", "llama_cpp-Q8_0", "--llama-cpp-python", str(python)])
    with pytest.raises(BenchmarkError, match="cannot be started: No such file"):
        compare_cpu.check_installed("vllm", str(tmp_path / "none"))
    compare_cpu.check_installed("paxkv", sys.executable)


def test_subjects_have_rows_and_first_tokens_are_counted(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        compare_cpu,
        "_write_models",
        lambda folder, subjects: dict.fromkeys(map(tuple, subjects), folder),
    )
    monkeypatch.setattr(compare_cpu, "check_installed", lambda program, python: None)
    started = []

    def run_worker(program, python, model, weights, **_):
        started.append(weights)
        figures = {name: [float(len(started))] for name in compare_cpu.COLUMNS}
        tokens = [1, 2, 3] if weights == "float32" else [1, 2, 4]
        return {"figures": figures, "first_tokens": tokens, "versions": {program: "1.0"}}

    monkeypatch.setattr(compare_cpu, "run_worker", run_worker)
    out = tmp_path / "rows.jsonl"
    subjects = ["paxkv-float32", "llama_cpp-Q4_0"]
    assert compare_cpu.main(["--subjects", *subjects, "--num-rounds", "2", "--out", str(out)]) == 0
    assert started == ["float32", "Q4_0"] * 2
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 2 * len(compare_cpu.COLUMNS)
    assert (rows[0]["min"], rows[0]["max"]) == (1.0, 3.0)
    assert rows[-1]["program_versions"] == {"llama_cpp": "1.0"}
    assert "first tokens like paxkv-float32, of 3: llama_cpp-Q4_0 2" in capsys.readouterr().out


def test_a_worker_that_takes_too_long_is_stopped(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    arguments = {"num_repetitions": 1, "cache_home": tmp_path, "timeout_s": 0.2}
    with pytest.raises(BenchmarkError, match=r"vllm-float32 was stopped after 0.2 s"):
        compare_cpu.run_worker("vllm", str(python), tmp_path, "float32", **arguments)


def test_unknown_weights_are_refused(capsys):
    with pytest.raises(SystemExit):
        compare_cpu.main(["--subjects", "paxkv-Q4_0"])
    assert "must be one of paxkv-float32, paxkv-int8" in capsys.readouterr().err
