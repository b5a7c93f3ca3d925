"""Flags of XLA in tests: most programs that tests compile run once or twice."""

import importlib.metadata
import os
from typing import Any

_LEVEL = "--xla_backend_optimization_level=0"
# JAX 0.10 is the last that can do without the fusion emitters. Programs then compile in a third of
# the time instead of two thirds, and the engine's programs, which set the level themselves, in two
# thirds.
HAS_OTHER_EMITTERS = importlib.metadata.version("jax").startswith("0.10.")
# Of test processes, and of the processes that they start. XLA would compile each program in several
# parts at the same time, which takes more CPU time.
QUICK_FLAGS = f"{_LEVEL} --xla_cpu_parallel_codegen_split_count=1"
if HAS_OTHER_EMITTERS:
    QUICK_FLAGS += " --xla_cpu_use_fusion_emitters=false"
# Options of a program in a test of what XLA makes of it: whether it copies a cache, for example.
AS_FOR_USERS: dict[str, Any] = {"xla_cpu_use_fusion_emitters": True} if HAS_OTHER_EMITTERS else {}


def compiles_quickly() -> bool:
    """Whether `tests/conftest.py` set XLA_FLAGS, and not the caller of the tests."""
    return os.environ.get("XLA_FLAGS") == QUICK_FLAGS


def user_flags() -> str:
    """XLA_FLAGS of a process that compiles the engine's programs as it does for users."""
    return _LEVEL if compiles_quickly() else os.environ.get("XLA_FLAGS", "")
