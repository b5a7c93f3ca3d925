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


def slow_unless_named(cases: Iterable[Any], *names: str, thorough: Iterable[str] = ()) -> list[Any]:
    """Parameters for `cases`; those not in `names` run with `pytest -m slow` only.

    Args:
        thorough: Those of `names` that CI's second Python leaves out.
    """
    return _marked(cases, names, thorough, pytest.mark.slow)


def thorough_unless_named(cases: Iterable[Any], *names: str) -> list[Any]:
    """Parameters for `cases`; CI's second Python leaves out those not in `names`."""
    return _marked(cases, names, (), pytest.mark.thorough)


def marked_sizes(
    sizes: Iterable[Any], *, thorough: Iterable[Any] = (), slow: Iterable[Any] = ()
) -> list[Any]:
    """Parameters for all of these.

    CI's second Python leaves out `thorough` ones. Those in `slow` run with `pytest -m slow` only.
    """
    return [
        *sizes,
        *(pytest.param(one, marks=pytest.mark.thorough) for one in thorough),
        *(pytest.param(one, marks=pytest.mark.slow) for one in slow),
    ]


def _marked(
    cases: Iterable[Any], names: Iterable[str], thorough: Iterable[str], other: pytest.MarkDecorator
) -> list[Any]:
    cases = list(cases)
    assert set(thorough) <= set(names) <= {case.name for case in cases}
    marks = dict.fromkeys((case.name for case in cases), other)
    marks |= dict.fromkeys(names, ()) | dict.fromkeys(thorough, pytest.mark.thorough)
    return [pytest.param(case, id=case.name, marks=marks[case.name]) for case in cases]
