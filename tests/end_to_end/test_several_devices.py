"""An engine on several devices answers as an engine on one device."""

import os
import subprocess
import sys

import pytest

from tests.end_to_end.split_engine import CASES


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case != "quick")) for case in CASES]
)
def test_devices_share_layers_and_the_answer_stays_the_same(case: str) -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    result = subprocess.run(
        [sys.executable, "-m", "tests.end_to_end.split_engine", case],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert result.stdout == "same\n", result.stderr
