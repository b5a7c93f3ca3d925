"""What an import brings along: no JAX for the host half, no HTTP libraries for the engine."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_importing_paxkv_imports_no_jax() -> None:
    program = (
        "import sys, paxkv, paxkv.scheduler.scheduler, paxkv.client.async_client, "
        "paxkv.engine.engine_core, paxkv.server.app, paxkv.replay, paxkv.serve, "
        "paxkv.entrypoints.cli.main, paxkv.entrypoints.cli.chat, paxkv.entrypoints.cli.bench, "
        "paxkv.entrypoints.cli.run_batch; "
        "sys.exit('jax' in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, check=False, timeout=120
        ).returncode
        == 0
    )


def test_engine_and_llm_import_without_the_servers_libraries() -> None:
    program = (
        "import sys; "
        "sys.modules.update(dict.fromkeys(['starlette', 'uvicorn', 'prometheus_client'])); "
        "import paxkv.llm, paxkv.engine.engine_core"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, check=False, timeout=120
        ).returncode
        == 0
    )


def test_importing_paxkv_alone_imports_next_to_nothing() -> None:
    program = (
        "import sys; before = set(sys.modules); import paxkv; "
        "new = {name.split('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(new - set(sys.stdlib_module_names) - {'paxkv'})); "
        "print(sorted(name for name in sys.modules if name.startswith('paxkv.'))); "
        "paxkv.SamplingParams, paxkv.BeamSearchParams, paxkv.StructuredOutputsParams"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.stdout, done.stderr) == ("[]\n[]\n", "")
