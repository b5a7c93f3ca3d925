"""Fixtures shared by the tests of every op."""

import functools

import jax
import pytest

from tests.quick_compile import quick_jit


@pytest.fixture(scope="session")
def run_jitted():
    """Runs `function(*args)` as one compiled program; keyword arguments are static.

    The results are NumPy's arrays: a slice of JAX's would be another program.
    """

    def run(function, *args, **static_kwargs):
        return jax.device_get(quick_jit(function, **static_kwargs)(*args))

    return run


@pytest.fixture
def run_simulated(capfd):
    """Runs `body(*args)`, a Mosaic GPU body, in interpret mode; asserts that no accesses race.

    JAX 0.12 raises at a race, 0.11.2 prints it and carries on.
    """

    def run(body, *args, **static_kwargs):
        import jax.experimental.pallas.mosaic_gpu as plgpu

        params = plgpu.InterpretGPUParams(detect_races=True)
        result = quick_jit(body, interpret=params, **static_kwargs)(*args)
        jax.block_until_ready(result)
        printed = capfd.readouterr()
        assert "RACE DETECTED" not in printed.out + printed.err
        return result

    return run


@pytest.fixture(scope="session")
def lower_for_cuda():
    """Lowers `function(*args)` for an NVIDIA GPU, without one; returns the text of the program."""

    def lower(function, *args, **static_kwargs):
        bound = functools.partial(function, **static_kwargs)
        return jax.jit(bound).trace(*args).lower(lowering_platforms=("cuda",)).as_text()

    return lower
