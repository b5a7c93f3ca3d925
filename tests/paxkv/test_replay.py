"""`python -m paxkv.replay`: exit codes and messages, and no JAX."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paxkv import replay
from tests.paxkv.trace.small_traces import make_request, record_run

ROOT = Path(__file__).resolve().parents[2]

# Where JAX is not installed, importing it raises; and it must not have been there before either.
WITHOUT_JAX = """
import sys

class NoJax:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jax", "jaxlib", "flax", "optax", "models", "pallas_kernels"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, NoJax())
from paxkv import replay
code = replay.main(sys.argv[1:])
assert not {"jax", "jaxlib", "flax", "models"} & set(sys.modules)
sys.exit(code)
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    record_run(tmp_path / "t.jsonl", make_request("a", 9), make_request("b", 10))
    return tmp_path / "t.jsonl"


def test_exact_replay_is_summed_up_and_exits_0(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay.main([str(trace)]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith(
        "3 steps, 2 requests, 0 preemptions, 13 tokens computed, 8 prompt tokens shared, "
        "4 tokens out; replayed in "
    )
    assert last.startswith("exact: ")


def test_first_difference_is_printed_and_exits_1(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = trace.read_text()
    # The second request's blocks in the first step: the shared one and its own.
    assert data.count("[[1,3]]") == 1
    trace.write_text(data.replace("[[1,3]]", "[[1,4]]"))
    assert replay.main([str(trace)]) == 1
    assert capsys.readouterr().out.splitlines()[1:] == [
        "first difference: step 1, schedule, field decision.new['b'].block_ids[0][1]",
        "  got      3",
        "  recorded 4",
    ]


def test_cut_off_last_line_is_reported_and_the_rest_replays(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace.write_bytes(trace.read_bytes()[:-20])
    assert replay.main([str(trace)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("2 steps, 2 requests") and "line 4 is cut off" in out


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "cannot be read"),
        (b"", "no complete first line"),
        (b"\x00\xff\n", "line 1 is not the header"),
        (
            b'{"format":"paxkv-trace","version":0,"paxkv_version":"0.0.1"}\n',
            "Replay it with the version that wrote it",
        ),
    ],
)
def test_what_is_no_trace_is_one_line_on_stderr_and_exits_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: bytes | None, message: str
) -> None:
    if data is not None:
        (tmp_path / "t").write_bytes(data)
    assert replay.main([str(tmp_path / "t")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1


def test_broken_line_exits_2(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = trace.read_bytes().splitlines(keepends=True)
    trace.write_bytes(b"".join([*lines[:2], b'{"calls":3}\n', *lines[2:]]))
    assert replay.main([str(trace)]) == 2
    assert "line 3: not a step" in capsys.readouterr().err


def test_perfetto_view_is_written_during_the_replay(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay.main([str(trace), "--perfetto", str(tmp_path / "view.json")]) == 0
    assert "view.json: " in capsys.readouterr().out
    assert json.loads((tmp_path / "view.json").read_text())["traceEvents"]


def test_replay_runs_without_jax(trace: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_JAX, str(trace), "--perfetto", str(trace) + ".json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "exact: " in done.stdout


def test_module_runs_from_the_command_line(trace: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "paxkv.replay", str(trace)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
