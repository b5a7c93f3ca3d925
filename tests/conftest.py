"""Settings of every test process: the CPU, and one compilation cache for the whole run."""

import os
import signal
import tempfile

# Tests and the servers they start compile many of the same programs; the folder lives as long as
# this run and is set before anything imports JAX, which reads it then.
_compilation_cache = tempfile.TemporaryDirectory(prefix="paxkv-test-compilations-")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _compilation_cache.name)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
# Programs that only a test compiles run once or twice, and take a fifth less time in all like this.
# Those of the engine say their own level for a CPU (`paxkv/runner/warmup.py`). `.ci/aot`, which
# compiles for other devices too, sets the variable itself.
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
# Threads of XLA's CPU client. A simulated GPU kernel blocks up to four of them at barriers, one a
# warpgroup; on a machine of two cores nobody would be left to release them.
os.environ.setdefault("NPROC", str(max(8, os.cpu_count() or 1)))

# A script's shell starts what runs in the background with SIGINT ignored. The processes that tests
# start and interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
