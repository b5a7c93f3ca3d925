"""How XLA compiles the engine's programs in tests: quickly, or as it does for users."""

import contextlib
import importlib.metadata
from collections.abc import Iterator
from typing import Any

import pytest

from models.platforms import CPU

# For programs that run a few times. JAX 0.10 is the last that can do without the emitters: then
# programs compile in a third of the time instead of two thirds, and scatters become loops.
_QUICK: dict[str, Any] = {"xla_backend_optimization_level": "0"}
if importlib.metadata.version("jax").startswith("0.10."):
    _QUICK["xla_cpu_use_fusion_emitters"] = False
_own_options = CPU.compiler_options


@contextlib.contextmanager
def quick_engine_compilations() -> Iterator[None]:
    """Engines made inside compile quickly. Processes that a test starts do as for users."""

    def quick_options(platform: CPU, *args: Any, **settings: Any) -> dict[str, Any]:
        return _own_options(platform, *args, **settings) | _QUICK

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CPU, "compiler_options", quick_options)
        yield


@contextlib.contextmanager
def own_engine_compilations() -> Iterator[None]:
    """Engines made inside compile as for users: for tests of what depends on machine code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CPU, "compiler_options", _own_options)
        yield
