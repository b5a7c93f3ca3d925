"""An engine of two processes answers as an engine of one."""

import os
import socket
import subprocess
import sys

import pytest

# One family for each kind of cache: keys and values, latents, and states; experts; and drafters.
CASES = [
    *("mistral_window", "llama", "gemma3_shallow", "deepseek_v3", "qwen3_next", "qwen3_moe"),
    *("eagle3", "draft_model", "mtp"),
]
# The case of the normal run: a window, in attention that is split over devices of two processes.
# Each process has two devices in this case, and one in all others.
QUICK_CASE = "mistral_window"


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case != QUICK_CASE)) for case in CASES]
)
def test_processes_share_layers_and_the_answer_stays_the_same(case: str) -> None:
    addresses = [f"127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}"]
    # More threads than cores: each process waits for the other in one of them.
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(1 + (case == QUICK_CASE)),
        "NPROC": "8",
    }
    command = [sys.executable, "-m", "tests.end_to_end.rank_engine", case]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), *addresses],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        outputs = [rank.communicate(timeout=900) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert "same" in outputs[0][0].splitlines(), outputs
    # The follower's engine ends with that of the leader.
    assert ranks[1].returncode == 0, outputs[1]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]
