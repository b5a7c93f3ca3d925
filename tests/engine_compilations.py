"""How XLA compiles the engine's programs in tests: quickly, or as it does for users."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from models.platforms import CPU
from tests.compiler_flags import AS_FOR_USERS, HAS_OTHER_EMITTERS

_QUICK: dict[str, Any] = {"xla_backend_optimization_level": "0"}
if HAS_OTHER_EMITTERS:
    _QUICK["xla_cpu_use_fusion_emitters"] = False
_own_options = CPU.compiler_options


@contextlib.contextmanager
def quick_engine_compilations() -> Iterator[None]:
    """Engines made inside compile quickly: with less optimization than processes of tests."""
    with _more_options(_QUICK):
        yield


@contextlib.contextmanager
def process_engine_compilations() -> Iterator[None]:
    """Engines made inside load the programs that a process of a test has compiled."""
    with _more_options({}):
        yield


@contextlib.contextmanager
def user_engine_compilations() -> Iterator[None]:
    """Engines made inside compile as for users: for tests of what depends on machine code."""
    with _more_options(AS_FOR_USERS):
        yield


@contextlib.contextmanager
def _more_options(options: Mapping[str, Any]) -> Iterator[None]:
    def compiler_options(platform: CPU, *args: Any, **settings: Any) -> dict[str, Any]:
        return _own_options(platform, *args, **settings) | options

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CPU, "compiler_options", compiler_options)
        yield
