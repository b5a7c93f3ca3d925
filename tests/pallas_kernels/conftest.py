"""Fixtures shared by the tests of every op."""

import functools

import jax
import pytest

# Tests compile hundreds of tiny programs; optimising them takes longer than running them.
QUICK_COMPILE = {"xla_backend_optimization_level": 0}


@pytest.fixture(scope="session")
def run_jitted():
    """Runs `function(*args)` as one compiled program; keyword arguments are static."""

    def run(function, *args, **static_kwargs):
        bound = functools.partial(function, **static_kwargs)
        return jax.jit(bound, compiler_options=QUICK_COMPILE)(*args)

    return run
