"""Ways to compile little in tests: quick options, one program per function and shape, few cases."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import pytest

# Tests compile hundreds of small programs; optimising them takes longer than running them.
QUICK_COMPILE: dict[str, Any] = {"xla_backend_optimization_level": 0}
# JAX 0.10 is the last that can do without the emitters, which take much of the time to compile.
if jax.__version_info__ < (0, 11):
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
        pytest.param(case, id=case.name, marks=[] if case.name in names else pytest.mark.slow)
        for case in cases
    ]
