"""`paxkv collect-env`: prints facts about the machine and its software, for problem reports."""

from paxkv.entrypoints.command_end import end_by_signals, run_command

# Before the imports below, which are slow.
if __name__ == "__main__":
    end_by_signals()

import argparse
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

import paxkv
from paxkv.config.environment_facts import PACKAGES, package_version, shown_variables
from paxkv.runner.programs.program_store import user_cache_folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one line per fact; returns the exit code of the process."""
    parser = argparse.ArgumentParser(
        prog="paxkv collect-env",
        description="Prints versions, devices and settings for a problem report, without keys.",
        allow_abbrev=False,
    )
    parser.parse_args(arguments)
    for name, value in facts():
        print(f"{name + ':':<34} {value}")
    return 0


def facts() -> Iterator[tuple[str, str]]:
    """Name and value of each fact."""
    yield "paxkv", paxkv.__version__
    yield "python", f"{platform.python_version()} ({platform.python_implementation()})"
    yield "platform", platform.platform()
    yield "cpu", f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores for this process"
    for package in PACKAGES:
        yield package, package_version(package) or "not installed"
    yield from _devices()
    yield "cache of compiled programs", _cache_folder()
    yield from shown_variables().items()


def _cache_folder() -> str:
    """The folder in which `program_store.py` stores programs by default."""
    jax_cache_dir = jax.config.jax_compilation_cache_dir
    if jax_cache_dir and "://" not in jax_cache_dir:
        return str(Path(jax_cache_dir) / "paxkv")
    return str(user_cache_folder() or "none: the user has no home folder")


def _devices() -> Iterator[tuple[str, str]]:
    try:
        devices = jax.devices()
    # JAX raises this if a backend cannot start, which the report should show.
    except RuntimeError as error:
        yield "devices", f"none: {error}"
        return
    yield "platform version", " ".join(devices[0].client.platform_version.split())
    for device in devices:
        yield f"device {device.id}", f"{device.platform} {device.device_kind}"


if __name__ == "__main__":
    sys.exit(run_command(main))
