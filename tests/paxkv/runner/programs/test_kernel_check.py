"""If kernels differ from XLA, the engine notices it and uses plain XLA."""

import logging
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from models.stored_kernels.bits16 import Bits16Kernel
from models.weight_rule import Source, WeightRule
from pallas_kernels import dispatch
from paxkv.runner.programs import expert_check, kernel_check
from paxkv.runner.programs.expert_check import CheckedProduct, products_of
from paxkv.runner.programs.kernel_check import choose_implementation, why_kernels_differ

H200 = pallas_kernels.Target(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")
PRODUCTS = (CheckedProduct(16, 24, "float32"),)


def spoil_products(monkeypatch, spoil):
    """Makes the products of experts of every body but XLA's wrong."""
    multiply = pallas_kernels.grouped_matmul

    def spoiled(*args, implementation):
        y = multiply(*args, implementation="xla")
        return y if implementation == "xla" else spoil(y)

    monkeypatch.setattr(pallas_kernels, "grouped_matmul", spoiled)
    monkeypatch.setattr(pallas_kernels, "tile_row_choices", lambda target: (8,))


@pytest.mark.parametrize(
    "spoil",
    [
        # `test_wrong_experts_alone_are_enough_to_use_xla` finds scaled products too.
        pytest.param(lambda y: y * 1.05, id="scaled", marks=pytest.mark.slow),
        pytest.param(lambda y: y.at[0].set(0), id="lost row"),  # the first row of an expert
        pytest.param(lambda y: y.at[:, -1].set(np.nan), id="nan"),
    ],
)
def test_wrong_products_of_experts_are_noticed(monkeypatch, spoil):
    spoil_products(monkeypatch, spoil)
    reason = why_kernels_differ(PRODUCTS, H200, implementation="reference")
    assert "experts of 16 x 24, tiles of 8 differs from XLA's by" in reason


def test_right_products_of_experts_pass_in_tiles_of_every_size(monkeypatch):
    sizes = []
    multiply = expert_check._multiply

    def watched(rows, expert_ids, kernel, tile_rows, implementation):
        sizes.append(tile_rows)
        return multiply(rows, expert_ids, kernel, tile_rows, implementation)

    monkeypatch.setattr(expert_check, "_multiply", watched)
    assert why_kernels_differ(PRODUCTS, H200, implementation="reference") is None
    numbers = ((rows, groups) for rows in range(1, 4096, 7) for groups in (1, 8, 128))
    chosen = {pallas_kernels.choose_tile_rows(*number, H200) for number in numbers}
    assert set(sizes) == chosen


def test_products_that_xla_computes_anyway_are_left_out(monkeypatch):
    # The kernel multiplies 16-bit floats alone.
    monkeypatch.delattr(expert_check, "_multiply")
    assert why_kernels_differ(PRODUCTS, H200) is None


def test_a_product_of_experts_that_cannot_run_is_a_reason_to_use_xla(monkeypatch, caplog):
    def fail(y):
        raise RuntimeError("CUDA says no")

    spoil_products(monkeypatch, fail)
    with caplog.at_level(logging.ERROR):
        reason = why_kernels_differ(
            PRODUCTS, H200, implementation="reference", tested="the product of experts"
        )
    assert reason == "running the product of experts raised RuntimeError"
    assert "CUDA says no" in caplog.text


def test_each_shape_of_stacked_experts_is_checked_once():
    def rule(layout, *axes):
        return WeightRule(sources=(Source(name="w", shape=()),), layout=layout, axes=axes)

    model = types.SimpleNamespace(
        parameters={
            "a.kernel": jnp.zeros((4, 16, 24)),
            "b.kernel": jnp.zeros((16, 24)),
            "c.kernel": jnp.zeros((4, 24, 16)),
            "d.kernel": jnp.zeros((8, 16, 24)),
            # Left out: a `StoredKernel` that is not an array uses plain XLA.
            "e.kernel": Bits16Kernel(jnp.zeros((4, 8, 8), jnp.uint16)),
        },
        weight_rules={
            **dict.fromkeys([f"{name}.kernel" for name in "acde"], rule("experts", *3 * (None,))),
            "b.kernel": rule("matrix", None, None),
        },
    )
    assert products_of(model) == {
        CheckedProduct(16, 24, "float32"),
        CheckedProduct(24, 16, "float32"),
    }


class FakeH200:
    platform, device_kind, compute_capability = "gpu", "NVIDIA H200", "9.0"


def test_kernels_that_differ_are_not_used_and_the_log_says_so(monkeypatch, caplog):
    monkeypatch.setattr(kernel_check, "target_misfit", lambda target: None)
    reasons = iter(["they rot", None, None, None])
    monkeypatch.setattr(kernel_check, "why_kernels_differ", lambda *args, **kwargs: next(reasons))
    with caplog.at_level(logging.ERROR):
        choice = choose_implementation("auto", (), (), (), FakeH200())
        assert choice.implementation == "xla"
        assert choice.why_no_kernels == "the kernels failed the check at the start: they rot."
        assert "NVIDIA H200" in caplog.text and "they rot" in caplog.text
        caplog.clear()
        assert choose_implementation("auto", (), (), (), FakeH200()).implementation is None
    assert not caplog.text


def test_wrong_experts_alone_are_enough_to_use_xla(monkeypatch, caplog):
    monkeypatch.setattr(kernel_check, "target_misfit", lambda target: None)
    spoil_products(monkeypatch, lambda y: y * 1.05)
    monkeypatch.setattr(expert_check, "_preferred_body", lambda *args: "reference")
    with caplog.at_level(logging.ERROR):
        assert choose_implementation("auto", (), PRODUCTS, (), FakeH200()).implementation == "xla"
    assert "experts of 16 x 24, tiles of 8" in caplog.text


def test_nothing_is_checked_on_a_cpu_or_if_xla_is_set():
    device = jax.devices("cpu")[0]
    choice = choose_implementation("auto", (), PRODUCTS, (), device)
    assert choice.implementation is None
    assert choice.why_no_kernels == "no Mosaic body is written for the platform 'cpu'."
    choice = choose_implementation("xla", (), PRODUCTS, (), device)
    assert choice == ("xla", "--kernels xla is set.", ())


def test_operations_without_a_kernel_are_named_in_the_choice(monkeypatch):
    """A model's shapes may fit the kernels of some operations only."""

    def check(tests, target, **kwargs):
        late = dispatch.LateBody(module="late", function="f")
        return dispatch.preferred_body("paged_attention", {"mosaic_gpu": late}, target) and None

    monkeypatch.setattr(kernel_check, "target_misfit", lambda target: None)
    monkeypatch.setattr(dispatch, "target_misfit", lambda target: None)
    monkeypatch.setattr(dispatch.LateBody, "misfit", lambda self: "heads of 80")
    monkeypatch.setattr(kernel_check, "why_kernels_differ", check)
    # The second time, the process has logged the operation already.
    for _ in range(2):
        choice = choose_implementation("auto", (), (), (), FakeH200())
        assert choice == (
            None,
            None,
            ("paged_attention runs as plain XLA, not as mosaic_gpu: heads of 80.",),
        )
