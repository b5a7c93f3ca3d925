"""Programs compiled ahead of time give the same tokens; other models and settings are refused."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from jax import monitoring

from paxkv import LLM, SamplingParams, compile
from paxkv.errors import ConfigError
from paxkv.fleet import replica_places
from paxkv.runner.programs.program_identity import identity_digest
from tests.demo_programs import SETTINGS, demo_programs
from tests.engine_compilations import process_engine_compilations
from tests.oracles.dense_model import dense_logits
from tests.oracles.make_checkpoint import write_random_checkpoint
from tests.small_engine import CHECKPOINT

PROMPTS = [[5, 6, 7], list(range(1, 20)), [9] * 4]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=3, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True),
]

# The logger of the number of programs that an engine loaded and compiled.
WARMUP = "paxkv.runner.programs.warmup"


@pytest.fixture(scope="module")
def compiled() -> Iterator[Path]:
    """Programs that `python -m paxkv.compile` compiled without weights, as for servers of tests."""
    with process_engine_compilations():
        yield demo_programs()


def answers(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected(compiled) -> list[list[int]]:
    """Answers of an engine that has only programs of the folder."""
    with LLM(compiled_dir=str(compiled), **SETTINGS) as llm:
        found = answers(llm)
        assert llm.get_stats().num_compiles_after_ready == 0
    return found


@pytest.fixture
def compiled_names(expected) -> Iterator[list[str]]:
    """Names of what XLA compiles from here on. `expected` has compiled what loading weights needs.

    `lazy_zeros` allocates each large KV cache with a function of its own, which is left out.
    """
    names = []

    def listen(event: str, duration: float, fun_name: str = "", **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration" and fun_name != "jit(<lambda>)":
            names.append(fun_name)

    monitoring.register_event_duration_secs_listener(listen)
    yield names
    monitoring.unregister_event_duration_listener(listen)


def test_compiled_ahead_gives_the_tokens_of_a_model_without_a_cache(expected):
    for prompt, params, token_ids in zip(PROMPTS, PARAMS, expected, strict=True):
        assert len(token_ids) == params.max_tokens
        if params.temperature == 0.0:
            logits = dense_logits(CHECKPOINT, [*prompt, *token_ids])
            assert logits[len(prompt) - 1 : -1].argmax(axis=-1).tolist() == token_ids


def test_compiled_ahead_gives_the_same_tokens_and_compiles_nothing(
    compiled, expected, compiled_names, caplog
):
    with caplog.at_level("INFO", WARMUP), LLM(compiled_dir=str(compiled), **SETTINGS) as llm:
        assert answers(llm) == expected
    assert compiled_names == []
    # JAX would not compile again what `expected` has compiled, so the engine's log counts too.
    assert ", 0 compiled, in " in caplog.text


def test_a_start_with_the_cache_gives_the_same_tokens_and_compiles_nothing(
    compiled, expected, tmp_path, compiled_names, caplog
):
    # As an earlier start would have left it.
    identity = json.loads((compiled / "programs.json").read_text())["identity"]
    shutil.copytree(compiled, tmp_path / identity_digest(identity))
    settings = {"compilation_cache_dir": str(tmp_path)} | SETTINGS
    with caplog.at_level("INFO", WARMUP), LLM(**settings) as llm:
        assert answers(llm) == expected
        assert llm.get_stats().num_compiles_after_ready == 0
    assert compiled_names == []
    assert ", 0 compiled, in " in caplog.text


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"max_num_seqs": 3}, "max_num_seqs: compiled with '8', now '3'"),
        ({"max_num_batched_tokens": 16}, "num_tokens: compiled with 32, now also 16"),
        ({"max_decode_burst": 3}, "max_steps: compiled with 8, now also 3"),
        ({"max_model_len": 512}, "max_blocks_per_req: compiled with [16], now also [8]"),
        ({"block_size": 8}, "block_size: compiled with [64], now also [8]"),
        ({"num_gpu_blocks_override": 73}, "number of KV blocks: compiled with '"),
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
