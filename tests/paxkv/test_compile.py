"""Programs compiled ahead of time give the same tokens; other models and settings are refused."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from jax import monitoring

from paxkv import LLM, SamplingParams, compile
from paxkv.errors import ConfigError
from paxkv.fleet import replica_places
from paxkv.runner.programs.program_identity import identity_digest
from tests.demo_programs import SETTINGS as OTHER_SETTINGS
from tests.demo_programs import demo_programs
from tests.engine_compilations import process_engine_compilations
from tests.oracles.make_checkpoint import write_random_checkpoint
from tests.small_engine import FLAGS, SETTINGS

PROMPTS = [[5, 6, 7], list(range(1, 20)), [9] * 4]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=3, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True),
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Path:
    """Programs compiled without weights, on which they do not depend."""
    out = tmp_path_factory.mktemp("compiled")
    assert compile.main(["--out", str(out), "--load-format", "dummy", *FLAGS]) == 0
    return out


def answers(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Answers of an engine with other programs, which the whole test run shares."""
    with process_engine_compilations():
        llm = LLM(compiled_dir=str(demo_programs()), **OTHER_SETTINGS)
    with llm:
        return answers(llm)


@pytest.fixture
def num_compilations(expected):
    """Counts XLA's compilations from here on; `expected` compiled what loading weights needs."""
    events = []

    def listen(event: str, duration: float, **kwargs: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(event)

    monitoring.register_event_duration_secs_listener(listen)
    yield lambda: len(events)
    monitoring.unregister_event_duration_listener(listen)


def test_compiled_ahead_gives_the_same_tokens_and_compiles_nothing(
    compiled, expected, num_compilations
):
    with LLM(compiled_dir=str(compiled), **SETTINGS) as llm:
        assert answers(llm) == expected
        assert llm.get_stats().num_compiles_after_ready == 0
    assert num_compilations() == 0


def test_a_start_with_the_cache_gives_the_same_tokens_and_compiles_nothing(
    compiled, expected, tmp_path, num_compilations
):
    # As an earlier start would have left it.
    identity = json.loads((compiled / "programs.json").read_text())["identity"]
    shutil.copytree(compiled, tmp_path / identity_digest(identity))
    with LLM(compilation_cache_dir=str(tmp_path), **SETTINGS) as llm:
        assert answers(llm) == expected
        assert llm.get_stats().num_compiles_after_ready == 0
    assert num_compilations() == 0


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"max_num_seqs": 3}, "max_num_seqs: compiled with '1', now '3'"),
        ({"max_num_batched_tokens": 64}, "num_tokens: compiled with 16, now also 64"),
        ({"max_decode_burst": 3}, "max_steps: compiled with 1, now also 3"),
        ({"max_model_len": 512}, "max_blocks_per_req: compiled with [64], now also [32]"),
        ({"block_size": 8}, "block_size: compiled with [16], now also [8]"),
        ({"num_gpu_blocks_override": 73}, "number of KV blocks: compiled with '72', now '73'"),
        ({"kv_cache_dtype": "float16"}, "KV cache: compiled with 'float32, "),
        ({"dtype": "bfloat16"}, "dtype: compiled with 'float32', now 'bfloat16'"),
        ({"kernels": "xla"}, "kernels' implementation: compiled with 'None', now 'xla'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_start_with_other_settings_is_refused_by_name(compiled, setting, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        LLM(compiled_dir=str(compiled), **SETTINGS | setting)


def test_another_model_is_refused_with_the_difference(tmp_path, compiled):
    other = write_random_checkpoint(tmp_path, num_layers=2)
    with pytest.raises(ConfigError, match="model's num_layers: compiled with '4', now '2'"):
        LLM(str(other), compiled_dir=str(compiled), **SETTINGS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "."], "Choose a new or an empty folder"),
        (["--block-size", "7"], "block_size must be"),
    ],
)
def test_mistake_is_one_line_and_exit_code_1(tmp_path, capsys, arguments, words):
    (tmp_path / "letter.txt").write_text("dear")
    assert compile.main(["--out", str(tmp_path), *arguments]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("paxkv: error: ") and words in output.err
    assert output.err.count("\n") == 1


def test_sampling_defaults_that_no_server_accepts_are_refused(tmp_path, capsys):
    path = tmp_path / "generation_config.json"
    path.write_text('{"temperature": -4}')
    out = tmp_path / "out"
    assert compile.main(["--out", str(out), "--generation-config", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith(f"paxkv: error: {path}: temperature must be")


def test_only_out_names_the_folder_of_programs(capsys):
    assert "--out DIR" in compile.make_parser().format_help()
    with pytest.raises(SystemExit):
        compile.main(["--out", "x", "--compiled-dir", "y"])
    assert "--compiled-dir" in capsys.readouterr().err


def test_replicas_have_programs_for_their_part_of_the_cores(monkeypatch, tmp_path) -> None:
    seen = []
    monkeypatch.setenv("NPROC", "7")
    monkeypatch.setattr(replica_places, "_num_cores", lambda: 4)
    monkeypatch.setattr(
        compile, "compile_programs", lambda *_, **__: seen.append(os.environ["NPROC"]) or 3
    )
    for size in ("1", "2", "4"):
        assert compile.main(["--out", str(tmp_path), "--data-parallel-size", size]) == 0
    assert seen == ["7", "2", "1"]
    assert compile.main(["--out", str(tmp_path), "--data-parallel-size", "5"]) == 1
