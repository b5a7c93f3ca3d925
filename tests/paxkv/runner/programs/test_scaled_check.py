"""If a kernel for quantized matrices differs from XLA, the engine notices it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from models.stored_kernels.scaled import ScaledKernel
from paxkv.runner.programs import kernel_check, scaled_check
from paxkv.runner.programs.kernel_check import choose_implementation, why_kernels_differ
from paxkv.runner.programs.scaled_check import CheckedScaledProduct, scaled_products_of
from tests.paxkv.runner.programs.test_kernel_check import H200, FakeH200

PRODUCT = CheckedScaledProduct(2, 32, 64, "int4", True, "bfloat16")


def spoil_products(monkeypatch, spoil, op="scaled_matmul"):
    """Makes the products of every body wrong, except those of XLA."""
    multiply = getattr(pallas_kernels, op)

    def spoiled(*args, implementation, **options):
        y = multiply(*args, implementation="xla", **options)
        return y if implementation == "xla" else spoil(y)

    monkeypatch.setattr(pallas_kernels, op, spoiled)


@pytest.mark.parametrize(
    "spoil",
    [lambda y: y * 1.05, lambda y: y.at[-1].set(0), lambda y: y.at[:, -1].set(np.nan)],
    ids=["scaled", "lost row", "nan"],
)
def test_wrong_products_are_noticed_and_xla_is_used(monkeypatch, spoil):
    monkeypatch.setattr(kernel_check, "target_misfit", lambda target: None)
    monkeypatch.setattr(pallas_kernels, "scaled_matmul_body", lambda *args, **kwargs: "reference")
    spoil_products(monkeypatch, spoil)
    choice = choose_implementation("auto", (), (), (PRODUCT,), FakeH200())
    assert choice.implementation == "xla"
    assert "product of 5 rows with int4 in groups of 32 bytes differs" in choice.why_no_kernels


def test_wrong_products_of_experts_are_noticed(monkeypatch):
    product = dataclasses.replace(PRODUCT, is_of_experts=True)
    assert why_kernels_differ([product], H200, implementation="reference") is None
    spoil_products(monkeypatch, lambda y: y.at[:, -1].set(0), "scaled_grouped_matmul")
    reason = why_kernels_differ([product], H200, implementation="reference")
    assert "product of tiles of 8 rows with int4 in groups of 32 bytes differs" in reason


@pytest.mark.parametrize("number_format", ["int4", "int8", "e4m3", "e2m1"])
def test_right_products_pass(monkeypatch, number_format):
    # The smallest size has padding.
    monkeypatch.setattr(scaled_check, "_NUM_ROWS", (5, 64))
    product = CheckedScaledProduct(2, 32, 64, number_format, False, "bfloat16")
    assert why_kernels_differ([product], H200, implementation="reference") is None


def test_products_that_xla_computes_anyway_are_left_out(monkeypatch):
    # The kernel multiplies only bfloat16.
    monkeypatch.delattr(CheckedScaledProduct, "_multiply")
    product = CheckedScaledProduct(2, 32, 64, "int4", True, "float32")
    assert why_kernels_differ([product], H200) is None


def test_the_quantized_matrices_of_a_module_are_its_products():
    def quantized(*shape, panel_width=None):
        return ScaledKernel.quantize(
            jnp.ones(shape), number_format="int8", group_size=32, panel_width=panel_width
        )

    class Module:
        parameters = {
            "norm": jnp.zeros(8, jnp.bfloat16),
            "ids": jnp.zeros(8, jnp.int32),
            "small": quantized(64, 192),
            "same": quantized(64, 192),
            "large": quantized(512, 576),
            "on_cpu": quantized(64, 192, panel_width=64),
            "experts": quantized(2, 64, 192),
        }

    assert scaled_products_of(Module()) == {
        CheckedScaledProduct(2, 32, 192, "int8", False, "bfloat16"),
        CheckedScaledProduct(12, 32, 320, "int8", False, "bfloat16"),
        CheckedScaledProduct(2, 32, 192, "int8", False, "bfloat16", is_of_experts=True),
    }
    assert isinstance(Module.parameters["norm"], jax.Array)
