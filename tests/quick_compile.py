"""Ways to compile little in tests: quick options, one program per function and shape, few cases."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import pytest

from tests.compiler_flags import HAS_OTHER_EMITTERS

# Tests compile hundreds of small programs; optimizing them takes longer than running them.
QUICK_COMPILE: dict[str, Any] = {"xla_backend_optimization_level": 0}
if HAS_OTHER_EMITTERS:
    QUICK_COMPILE["xla_cpu_use_fusion_emitters"] = False


@functools.cache
def quick_jit(function: Callable[..., Any], **static_kwargs: Any) -> Callable[..., Any]:
    """`function` as a program that compiles quickly, with keyword arguments bound.

    The same arguments give the same object, so calls with arrays of one shape share one program.
    """
    return jax.jit(functools.partial(function, **static_kwargs), compiler_options=QUICK_COMPILE)


def slow_unless_named(cases: Iterable[Any], *names: str) -> list[Any]:
    """Parameters for `cases`; those not in `names` run with `pytest -m slow` only."""
    cases = list(cases)
    assert set(names) <= {case.name for case in cases}
    return [
        pytest.param(case, id=case.name, marks=() if case.name in names else pytest.mark.slow)
        for case in cases
    ]


def marked_sizes(sizes: Iterable[Any], *, slow: Iterable[Any]) -> list[Any]:
    """Parameters for all of these. Those in `slow` run with `pytest -m slow` only."""
    return [*sizes, *(pytest.param(one, marks=pytest.mark.slow) for one in slow)]


def marked_cases(cases: Iterable[Any], *, slow: Iterable[tuple[Any, ...]]) -> list[Any]:
    """As `marked_sizes`, for tests with several parameters: a case is a tuple of their values."""
    return [*cases, *(pytest.param(*case, marks=pytest.mark.slow) for case in slow)]
