"""Tests of `dispatch.py`, with bodies that only say their names."""

import functools
import itertools
import logging
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import (
    IMPLEMENTATIONS,
    MIN_JAX_FOR_MOSAIC_GPU,
    LateBody,
    mosaic_bodies,
    preferred_body,
    run_op,
    target_misfit,
)
from pallas_kernels.target import Target

CPU = Target(platform="cpu", device_kind="cpu")
TPU = Target(platform="tpu", device_kind="TPU v6 lite")
OLD_TPU = Target(platform="tpu", device_kind="TPU v4")
HOPPER = Target(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")
AMPERE = Target(platform="gpu", device_kind="NVIDIA A100", compute_capability="8.0")
BLACKWELL = Target(platform="gpu", device_kind="NVIDIA B200", compute_capability="10.0")


@pytest.fixture
def new_jax(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", MIN_JAX_FOR_MOSAIC_GPU)


_package_number = itertools.count()


@pytest.fixture
def calls():
    """What the bodies of `fake` were called with: (name, x, interpret, other arguments)."""
    return []


@pytest.fixture
def bodies(monkeypatch, calls):
    """The bodies of an op `fake`: each notes its call and returns x + 1 + row; -1 is a misfit.

    Those of Mosaic note calls when they are traced.
    """
    # A new one for each test: what was traced for another test is kept.
    package = f"fake_{next(_package_number)}"

    def misfit(x, row=0, **options):
        return "x is negative" if isinstance(x, int) and x < 0 else None

    for platform in ("gpu", "tpu"):
        module = types.ModuleType(f"{package}.mosaic_{platform}")
        module.misfit = misfit

        def body(x, row=0, *, interpret=False, platform=platform, **options):
            calls.append((f"mosaic_{platform}", x, interpret, options))
            return x + 1 + row

        body.__name__ = f"fake_mosaic_{platform}"  # programs call it by this name
        setattr(module, body.__name__, body)
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def plain(name, x, **options):
        calls.append((name, x, False, options))
        return x + 1

    return {
        "reference": functools.partial(plain, "reference"),
        "xla": functools.partial(plain, "xla"),
        **mosaic_bodies(package, "fake", "gpu", "tpu"),
    }


def test_every_implementation_has_one_name():
    assert IMPLEMENTATIONS == (
        "reference",
        "xla",
        "mosaic_gpu",
        "mosaic_gpu_interpret",
        "mosaic_tpu",
        "mosaic_tpu_interpret",
    )


@pytest.mark.parametrize(
    ("target", "wanted"),
    [
        (CPU, "xla"),
        (HOPPER, "mosaic_gpu"),
        (AMPERE, "xla"),
        (BLACKWELL, "xla"),
        (TPU, "mosaic_tpu"),
        (Target(platform="tpu", device_kind="TPU v5 lite"), "mosaic_tpu"),
        (OLD_TPU, "xla"),
    ],
    ids=lambda value: getattr(value, "device_kind", value),
)
def test_none_means_the_body_written_for_the_chip(bodies, calls, new_jax, target, wanted):
    assert preferred_body("fake", bodies, target, 1) == wanted
    assert run_op("fake", bodies, None, target, 1, scale=2) == 2
    assert [name for name, *_ in calls] == [wanted]


def test_arguments_and_options_reach_the_body(bodies, calls, new_jax):
    assert run_op("fake", bodies, "xla", CPU, 7, scale=2) == 8
    assert run_op("fake", bodies, None, HOPPER, 7, scale=2) == 8
    assert calls[0] == ("xla", 7, False, {"scale": 2})
    name, _, is_interpreted, options = calls[1]
    assert (name, is_interpreted, options) == ("mosaic_gpu", False, {"scale": 2})


def layers_of(bodies, sinks, windows):
    """A function that calls a Mosaic body once per layer, each with its own row."""

    def run(x):
        for row, (sink, window) in enumerate(zip(sinks, windows, strict=True)):
            x = run_op("fake", bodies, "mosaic_gpu", CPU, x, row, sinks=sink, window=window)
        return x

    return run


def test_equal_layers_share_one_function_of_the_program(bodies, calls, new_jax):
    sinks = [jnp.full((2,), layer, jnp.float32) for layer in range(4)]
    run = jax.jit(layers_of(bodies, sinks, windows=[None] * 4))
    text = run.lower(jnp.int32(0)).as_text()
    assert text.count("call @fake_mosaic_gpu") == 4
    assert text.count("func.func private @fake_mosaic_gpu") == 1
    # Arrays are operands, also those given by name; what a kernel is compiled for is not.
    ((name, _, _, options),) = calls
    assert name == "mosaic_gpu"
    assert isinstance(options["sinks"], jax.core.Tracer) and options["window"] is None
    # So is the row, or the layers would all have that of the first.
    assert run(0) == 4 + (0 + 1 + 2 + 3)


def test_layers_with_other_static_arguments_have_a_function_of_their_own(bodies, calls, new_jax):
    run = jax.jit(layers_of(bodies, sinks=[None] * 4, windows=[8, None, 8, None]))
    text = run.lower(jnp.int32(0)).as_text()
    assert text.count("call @fake_mosaic_gpu") == 4
    assert text.count("func.func private @fake_mosaic_gpu") == 2
    assert [options["window"] for *_, options in calls] == [8, None]
    assert run(0) == 4 + (0 + 1 + 2 + 3)


def test_bodies_get_numpy_arrays_as_jax_arrays(bodies, calls):
    run_op("fake", bodies, "xla", CPU, np.arange(3, dtype=np.int32))
    ((_, got, *_),) = calls
    assert isinstance(got, jax.Array)
    np.testing.assert_array_equal(got, [0, 1, 2])


def test_without_a_target_the_default_device_counts(bodies, calls):
    run_op("fake", bodies, None, None, 1)
    # The tests run on the CPU.
    assert [name for name, *_ in calls] == ["xla"]


def test_old_jax_runs_xla_on_a_gpu_and_mosaic_on_a_tpu(bodies, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    assert preferred_body("fake", bodies, HOPPER, 1) == "xla"
    assert preferred_body("fake", bodies, TPU, 1) == "mosaic_tpu"


def test_arguments_that_a_body_cannot_take_go_to_xla(bodies, new_jax):
    assert preferred_body("fake", bodies, HOPPER, -1) == "xla"
    assert preferred_body("fake", bodies, TPU, -1) == "xla"


def test_an_op_without_a_mosaic_body_is_xla_and_silent(bodies, new_jax, caplog):
    bodies = {name: bodies[name] for name in ("reference", "xla")}
    with caplog.at_level(logging.WARNING):
        assert preferred_body("bodiless", bodies, HOPPER, 1) == "xla"
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (HOPPER, None),
        (TPU, None),
        (AMPERE, "compute capability 9.0 .*, and 'NVIDIA A100' has 8.0"),
        (BLACKWELL, "compute capability 9.0 .*, and 'NVIDIA B200' has 10.0"),
        (Target(platform="gpu"), "and '' has None"),
        (
            Target(platform="gpu", device_kind="AMD Instinct MI300X", compute_capability="gfx942"),
            "and 'AMD Instinct MI300X' has gfx942",
        ),
        (OLD_TPU, "fit the memory of .*TPU v5 lite.*, and the device is 'TPU v4'"),
        (CPU, "no Mosaic body is written for the platform 'cpu'"),
    ],
    ids=str,
)
def test_target_misfit_says_why(new_jax, target, reason):
    got = target_misfit(target)
    if reason is None:
        assert got is None
    else:
        pytest.raises(ValueError, _raise, got).match(reason)


def _raise(message):
    raise ValueError(message)


def test_target_misfit_names_the_jax_that_is_wanted(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 1))
    assert "it needs JAX 0.11.2 or newer" in target_misfit(HOPPER)
    assert target_misfit(TPU) is None


def test_each_reason_is_logged_once_per_op(bodies, new_jax, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            preferred_body("op_said_once", bodies, HOPPER, -1)
        preferred_body("op_said_once", bodies, AMPERE, 1)
        preferred_body("another_op_said_once", bodies, HOPPER, -1)
        preferred_body("op_said_once", bodies, HOPPER, 1)
    said = [message for message in caplog.messages if "op_said_once" in message]
    assert said == [
        "op_said_once runs as plain XLA, not as mosaic_gpu: x is negative.",
        "op_said_once runs as plain XLA, not as mosaic_gpu: it needs compute capability "
        "9.0 (H100, H200), and 'NVIDIA A100' has 8.0.",
        "another_op_said_once runs as plain XLA, not as mosaic_gpu: x is negative.",
    ]


def test_the_cpu_runs_xla_without_a_warning(bodies, new_jax, caplog):
    with caplog.at_level(logging.WARNING):
        preferred_body("op_on_a_cpu", bodies, CPU, 1)
    assert caplog.messages == []


def test_an_unknown_name_is_refused_with_the_allowed_ones(bodies):
    with pytest.raises(ValueError, match=r"fake .* got 'triton', wanted None or one of \['mosaic_"):
        run_op("fake", bodies, "triton", CPU, 1)


def test_a_named_body_that_cannot_do_the_call_refuses_it(bodies, new_jax):
    message = "fake: the body 'mosaic_gpu' cannot do this call: x is negative. Pass implementation"
    with pytest.raises(ValueError, match=message):
        run_op("fake", bodies, "mosaic_gpu", CPU, -1)


def test_a_named_gpu_body_refuses_old_jax_before_it_is_imported(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    bodies = mosaic_bodies("no_such_package", "op", "gpu")
    for name in ("mosaic_gpu", "mosaic_gpu_interpret"):
        with pytest.raises(ValueError, match="it needs JAX 0.11.2 or newer"):
            run_op("fake", bodies, name, CPU, 1)


def test_a_named_body_runs_whatever_the_target_is(bodies, calls, new_jax):
    # To be compiled ahead of time, or lowered for another platform.
    run_op("fake", bodies, "mosaic_gpu", CPU, 1)
    assert [name for name, *_ in calls] == ["mosaic_gpu"]


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_the_interpreted_body_is_called_with_interpret(bodies, calls, new_jax, platform):
    run_op("fake", bodies, f"mosaic_{platform}_interpret", CPU, 1, scale=2)
    assert calls == [(f"mosaic_{platform}", 1, True, {"scale": 2})]


def test_mosaic_bodies_are_named_by_convention():
    assert mosaic_bodies("pallas_kernels.fake", "fake", "gpu") == {
        "mosaic_gpu": LateBody("pallas_kernels.fake.mosaic_gpu", "fake_mosaic_gpu"),
        "mosaic_gpu_interpret": LateBody(
            "pallas_kernels.fake.mosaic_gpu", "fake_mosaic_gpu", is_interpreted=True
        ),
    }


def test_a_late_body_is_imported_only_when_it_is_looked_at():
    body = LateBody("no_such_package.mosaic_gpu", "op_mosaic_gpu")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        body.load()
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        body.misfit(1)
