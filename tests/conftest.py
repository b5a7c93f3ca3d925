"""Settings of every test process: the CPU, and one compilation cache for the whole run."""

import gc
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import certifi
import pytest
from hypothesis import HealthCheck, settings

# pytest rewrites the asserts of test files only. The asserts of other modules would explain no
# failure, and `python -O` would drop them.
_names = {f"tests.{path.stem}" for path in Path(__file__).parent.iterdir()}
pytest.register_assert_rewrite(*_names.difference(sys.modules))

from tests.compiler_flags import QUICK_FLAGS, compiles_quickly  # noqa: E402
from tests.time_limit import limit_of, time_limit  # noqa: E402

# Tests and the servers they start compile many of the same programs. The folder lives as long as
# this run and is set before anything imports JAX, which reads it then. Workers of pytest-xdist
# inherit the variable, and so the folder of the process that starts them.
_compilation_cache = tempfile.TemporaryDirectory(prefix="paxkv-test-compilations-")
# Processes write bytecode even if the caller forbids it. Tests start some hundred processes.
# Without bytecode, each of them and each worker of pytest-xdist would compile all modules of paxkv
# again. Git ignores the folders of bytecode.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# HTTP clients of tests stay on this machine. Each loads certificate authorities when it is made:
# all that are known take up to 40 ms of CPU time, the first of them less than one.
_authority = Path(_compilation_cache.name, "authority.pem")
_end_of_first = "-----END CERTIFICATE-----\n"
_authority.write_text(
    Path(certifi.where()).read_text(encoding="utf-8").partition(_end_of_first)[0] + _end_of_first
)
os.environ["SSL_CERT_FILE"] = str(_authority)
# No test writes into the user's cache folder, where an engine stores programs if no folder is set.
# Matplotlib would read all fonts of the machine again without its own cache there.
_user_cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
os.environ.setdefault("MPLCONFIGDIR", os.path.join(_user_cache, "matplotlib"))
os.environ["XDG_CACHE_HOME"] = _compilation_cache.name
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _compilation_cache.name)
# Storing a program takes a tenth of the time of compiling it. Few programs but the large ones of
# engines are compiled twice in a run.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "1.5")
# Programs do not name the lines that they come from: lowering then takes less time.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# `.ci/aot` sets the variable itself where it compiles for other devices. Workers of pytest-xdist
# inherit the variable, so its presence alone does not say who set it.
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ.setdefault("XLA_FLAGS", QUICK_FLAGS)
# Threads of XLA's CPU client. A simulated GPU kernel blocks up to four of them at barriers, one a
# warpgroup; on a machine of two cores, no thread would be left to release them.
os.environ.setdefault("NPROC", str(max(8, os.cpu_count() or 1)))

# The only settings of property tests, except for their number of examples. They have no deadline,
# since machines may be slow. With CI set, as in `.ci/run`, every run draws the same examples.
settings.register_profile(
    "paxkv",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("paxkv")

# A script's shell starts what runs in the background with SIGINT ignored. The processes that tests
# start and interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keeps the garbage collector away from imported modules and collected tests, which all stay.

    Collecting takes 17 s of CPU time with the collector and 11 s without it. Later passes of the
    collector are shorter, too. Larger thresholds than Python's defaults make them rarer: tracing a
    program makes many small objects, few of which are garbage.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 10, 50)
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Restores the level of the logs of paxkv, which its commands set in their process.

    After the last test of a file, keeps the garbage collector away from what JAX and modules hold
    by then. A test that collects garbage late in a run would take 5 s for it.
    """
    logger = logging.getLogger("paxkv")
    level = logger.level
    try:
        return (yield)
    finally:
        logger.setLevel(level)
        if nextitem is None or nextitem.path != item.path:
            gc.freeze()


def _limited(item: pytest.Item) -> Generator[None, object, object]:
    with time_limit(limit_of(item)):
        return (yield)


# Each phase has a limit of its own. The wrappers are the innermost ones, so that pytest reports
# the test that took too long.
@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from _limited(item))


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from _limited(item))


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from _limited(item))


@pytest.fixture(scope="session", autouse=True)
def quick_engine_compilations() -> Iterator[None]:
    """Engines of this process compile quickly, unless XLA_FLAGS was set: then as for users."""
    if not compiles_quickly() or "jax" not in sys.modules:
        yield
        return
    # Not before: tests of the host half alone do not load JAX.
    from tests import engine_compilations

    with engine_compilations.quick_engine_compilations():
        yield
