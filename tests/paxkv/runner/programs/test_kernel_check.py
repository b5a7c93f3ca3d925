"""The engine notices kernels that do not give XLA's results, and serves with plain XLA then."""

import dataclasses
import logging
import types

import jax
import numpy as np
import pytest

import pallas_kernels
from models import AttentionConfig, AttentionFormat, RopeConfig
from models.weight_rule import Source, WeightRule
from pallas_kernels import dispatch
from paxkv.runner.programs import expert_check, kernel_check
from paxkv.runner.programs.expert_check import CheckedProduct, products_of
from paxkv.runner.programs.kernel_check import (
    CheckedLayer,
    choose_implementation,
    relative_error,
    why_kernels_differ,
    why_products_differ,
)

FORMAT = AttentionFormat(num_kv_heads=2, head_dim=16, dtype="float32")
H200 = pallas_kernels.Target(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")


FULL = AttentionConfig(
    hidden_size=64, num_q_heads=4, num_kv_heads=2, head_dim=16, rope=RopeConfig(), scale=0.25
)


PRODUCTS = (CheckedProduct(16, 24, "float32"),)


def checked(*layers, cache=FORMAT, block_size=16):
    """Layers that all keep keys and values alike."""
    return tuple(CheckedLayer(layer, cache, block_size) for layer in layers)


LAYERS = checked(FULL, dataclasses.replace(FULL, sliding_window=50))


_run_layer = kernel_check._run_layer
_results = {}


def kernels_of_layers():
    return pallas_kernels.paged_attention, pallas_kernels.kv_scatter, pallas_kernels.block_copy


RIGHT_KERNELS = kernels_of_layers()


def run_layer_once(inputs, rules, chosen):
    """`_run_layer`, except that right results are computed once for all tests of this file.

    Tests replace kernels by wrong ones, but never those of XLA.
    """
    implementation = chosen["implementation"]
    if implementation != "xla" and kernels_of_layers() != RIGHT_KERNELS:
        return _run_layer(inputs, rules, chosen)
    # The inputs are drawn from a seed that depends on the window.
    key = (*sorted(rules.items()), inputs["q"].shape, inputs["sinks"] is None, implementation)
    if key not in _results:
        _results[key] = _run_layer(inputs, rules, chosen)
    return _results[key]


@pytest.fixture(autouse=True)
def right_layers_run_once(monkeypatch):
    monkeypatch.setattr(kernel_check, "_run_layer", run_layer_once)


def test_requests_hold_every_block_of_the_pool_once_and_not_the_null_block():
    inputs = kernel_check._random_layer(LAYERS[0], seed=0)
    num_blocks = inputs["kv_cache"].shape[1] // 2
    assert sorted(inputs["block_tables"].ravel().tolist()) == list(range(1, num_blocks))


def test_right_kernels_pass():
    assert why_kernels_differ(LAYERS, H200, implementation="reference") is None


def spoil_layer(monkeypatch, spoil, *, is_spoiled=lambda rules: True):
    """Makes the attention of every body but XLA's wrong where `is_spoiled`."""

    def spoiled_layer(inputs, rules, chosen):
        out_np, *caches_np = run_layer_once(inputs, rules, chosen | {"implementation": "xla"})
        if chosen["implementation"] != "xla" and is_spoiled(rules):
            out_np = spoil(out_np)
        return (out_np, *caches_np)

    monkeypatch.setattr(kernel_check, "_run_layer", spoiled_layer)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda out_np: out_np * 1.05,
        lambda out_np: np.where(np.arange(len(out_np))[:, None, None] == 1, 0, out_np),
        lambda out_np: np.where(np.arange(len(out_np))[:, None, None] == 50, np.nan, out_np),
        lambda out_np: np.roll(out_np, 1, axis=1),
    ],
    ids=["scaled", "lost token", "nan", "wrong head"],
)
def test_wrong_attention_is_noticed(monkeypatch, spoil):
    spoil_layer(monkeypatch, spoil)
    reason = why_kernels_differ(LAYERS, H200, implementation="reference")
    assert "differs from XLA's" in reason


def test_every_kind_of_layer_is_tried(monkeypatch):
    is_spoiled = lambda rules: rules["sliding_window"] == 50  # noqa: E731
    spoil_layer(monkeypatch, lambda out_np: -out_np, is_spoiled=is_spoiled)
    reason = why_kernels_differ(LAYERS, H200, implementation="reference")
    assert "'sliding_window': 50" in reason


def test_layers_of_other_numbers_of_heads_are_tried(monkeypatch):
    tried = []

    def run_layer(inputs, rules, chosen):
        tried.append(inputs["q"].shape[1])
        return np.ones(1), np.ones((1, 2))

    monkeypatch.setattr(kernel_check, "_run_layer", run_layer)
    layers = checked(FULL, dataclasses.replace(FULL, num_q_heads=8), FULL)
    assert why_kernels_differ(layers, H200, implementation="reference") is None
    assert sorted(tried) == [4, 4, 8, 8]  # each with XLA and with the kernels


def test_layers_are_tried_with_keys_and_values_as_they_are_stored(monkeypatch):
    """In wider heads, or in blocks of another size."""
    tried = []

    def run_layer(inputs, rules, chosen):
        kv_cache = inputs["kv_cache"]
        tried.append((kv_cache.shape[2:], str(kv_cache.dtype)))
        assert inputs["q"].shape[-1] == inputs["v"].shape[-1] == kv_cache.shape[-1]
        return np.ones(1), np.ones((1, 2))

    monkeypatch.setattr(kernel_check, "_run_layer", run_layer)
    layers = (
        *checked(FULL, FULL),
        *checked(FULL, cache=dataclasses.replace(FORMAT, head_dim=32)),
        *checked(FULL, block_size=32),
    )
    assert why_kernels_differ(layers, H200, implementation="reference") is None
    wanted = [(2, 16, 16), (2, 16, 32), (2, 32, 16)]
    assert sorted(tried) == [(page, "float32") for page in wanted for _ in range(2)]


@pytest.mark.parametrize("part", ["K", "V"])
def test_wrong_write_is_noticed(monkeypatch, part):
    scatter = pallas_kernels.kv_scatter

    def one_off(kv_cache, k, v, slots, row, *, implementation, target):
        right = scatter(kv_cache, k, v, slots, row, implementation="xla", target=target)
        if implementation == "xla":
            return right
        wrong = scatter(kv_cache, k, v, slots + 1, row, implementation="xla", target=target)
        start = "KV".index(part)
        return right.at[:, start::2].set(wrong[:, start::2])

    monkeypatch.setattr(pallas_kernels, "kv_scatter", one_off)
    reason = why_kernels_differ(LAYERS, H200, implementation="reference")
    assert reason == f"{part} was not written where XLA writes it"


def test_wrong_block_copy_is_noticed(monkeypatch):
    copy = pallas_kernels.block_copy

    def reads_late(pages, sources, targets, *, implementation, target):
        if implementation == "xla":
            return copy(pages, sources, targets, implementation="xla", target=target)
        for i in range(len(sources)):
            pages = copy(pages, sources[i : i + 1], targets[i : i + 1], implementation="xla")
        return pages

    monkeypatch.setattr(pallas_kernels, "block_copy", reads_late)
    reason = why_kernels_differ(LAYERS, H200, implementation="reference")
    assert reason == "K was not written where XLA writes it"


# Limits that sequences as short as the check's would not feel.
FAR_LIMITS = checked(dataclasses.replace(FULL, sliding_window=4096, soft_cap=50.0))


@pytest.mark.parametrize(
    "spoil_rules",
    [
        lambda rules: {"soft_cap": None},
        lambda rules: {"sliding_window": None},
        lambda rules: {"sliding_window": rules["sliding_window"] + 1},
    ],
    ids=["no soft cap", "no window", "window one too long"],
)
def test_far_limits_that_a_kernel_gets_wrong_are_noticed(monkeypatch, spoil_rules):
    attend = pallas_kernels.paged_attention

    def spoiled(*args, implementation, **rules):
        changes = {} if implementation == "xla" else spoil_rules(rules)
        return attend(*args, implementation="xla", **(rules | changes))

    monkeypatch.setattr(pallas_kernels, "paged_attention", spoiled)
    reason = why_kernels_differ(FAR_LIMITS, H200, implementation="reference")
    assert "differs from XLA's" in reason


@pytest.mark.parametrize(
    ("fields", "spoil_rules"),
    [
        ({"has_sinks": True}, lambda rules: {"sinks": None}),
        ({"has_sinks": True}, lambda rules: {"sinks": rules["sinks"][::-1]}),
        ({"chunk_size": 8192}, lambda rules: {"chunk_size": None}),
        ({"chunk_size": 8192}, lambda rules: {"chunk_size": rules["chunk_size"] + 1}),
    ],
    ids=["no sinks", "sinks of other heads", "no chunks", "chunks one too long"],
)
def test_sinks_and_chunks_that_a_kernel_gets_wrong_are_noticed(monkeypatch, fields, spoil_rules):
    attend = pallas_kernels.paged_attention

    def spoiled(*args, implementation, **rules):
        has_limit = rules["sinks"] is not None or rules["chunk_size"] is not None
        changes = spoil_rules(rules) if has_limit and implementation != "xla" else {}
        return attend(*args, implementation="xla", **(rules | changes))

    # The full layer is last: it must not be tried in place of the other one.
    layers = checked(dataclasses.replace(FULL, **fields), FULL)
    assert why_kernels_differ(layers, H200, implementation="reference") is None
    monkeypatch.setattr(pallas_kernels, "paged_attention", spoiled)
    reason = why_kernels_differ(layers, H200, implementation="reference")
    assert "differs from XLA's" in reason
    assert ("sinks" in reason) == ("has_sinks" in fields)


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
        lambda y: y * 1.05,
        lambda y: y.at[0].set(0),  # the first row of an expert
        lambda y: y.at[:, -1].set(np.nan),
    ],
    ids=["scaled", "lost row", "nan"],
)
def test_wrong_products_of_experts_are_noticed(monkeypatch, spoil):
    spoil_products(monkeypatch, spoil)
    reason = why_products_differ(PRODUCTS, H200, implementation="reference")
    assert "experts of 16 x 24, tiles of 8 differs from XLA's by" in reason


def test_right_products_of_experts_pass_in_tiles_of_every_size(monkeypatch):
    sizes = []
    multiply = expert_check._multiply

    def watched(rows, expert_ids, kernel, tile_rows, implementation):
        sizes.append(tile_rows)
        return multiply(rows, expert_ids, kernel, tile_rows, implementation)

    monkeypatch.setattr(expert_check, "_multiply", watched)
    assert why_products_differ(PRODUCTS, H200, implementation="reference") is None
    numbers = ((rows, groups) for rows in range(1, 4096, 7) for groups in (1, 8, 128))
    chosen = {pallas_kernels.choose_tile_rows(*number, H200) for number in numbers}
    assert set(sizes) == chosen


def test_products_that_xla_computes_anyway_are_left_out(monkeypatch):
    # The kernel multiplies 16-bit floats alone.
    monkeypatch.delattr(expert_check, "_multiply")
    assert why_products_differ(PRODUCTS, H200) is None


def test_a_product_of_experts_that_cannot_run_is_a_reason(monkeypatch, caplog):
    def fail(y):
        raise RuntimeError("CUDA says no")

    spoil_products(monkeypatch, fail)
    with caplog.at_level(logging.ERROR):
        reason = why_products_differ(PRODUCTS, H200, implementation="reference")
    assert reason == "running the product of experts raised RuntimeError"
    assert "CUDA says no" in caplog.text


def test_the_stacks_of_a_model_are_its_products():
    def rule(layout, *axes):
        return WeightRule(sources=(Source(name="w", shape=()),), layout=layout, axes=axes)

    model = types.SimpleNamespace(
        param_names=("a.kernel", "b.kernel", "b.kernel.0", "c.kernel", "d.kernel"),
        params=(
            *(np.zeros((4, 16, 24), np.float32), np.zeros((16, 24), np.float32)),
            *(np.zeros((16, 8), np.float32), np.zeros((4, 24, 16), np.float32)),
            np.zeros((8, 16, 24), np.float32),
        ),
        weight_rules={
            **dict.fromkeys(("a.kernel", "c.kernel", "d.kernel"), rule("experts", *3 * (None,))),
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
    reasons = iter(["they rot", None])
    monkeypatch.setattr(kernel_check, "why_kernels_differ", lambda *args: next(reasons))
    with caplog.at_level(logging.ERROR):
        choice = choose_implementation("auto", LAYERS, (), FakeH200())
        assert choice.implementation == "xla"
        assert choice.why_no_kernels == "the kernels failed the check at the start: they rot."
        assert "NVIDIA H200" in caplog.text and "they rot" in caplog.text
        caplog.clear()
        assert choose_implementation("auto", LAYERS, (), FakeH200()).implementation is None
    assert not caplog.text


def test_wrong_experts_alone_are_enough_to_use_xla(monkeypatch, caplog):
    monkeypatch.setattr(kernel_check, "target_misfit", lambda target: None)
    monkeypatch.setattr(kernel_check, "why_kernels_differ", lambda *args: None)
    spoil_products(monkeypatch, lambda y: y * 1.05)
    monkeypatch.setattr(expert_check, "_preferred_body", lambda *args: "reference")
    with caplog.at_level(logging.ERROR):
        assert choose_implementation("auto", LAYERS, PRODUCTS, FakeH200()).implementation == "xla"
    assert "experts of 16 x 24, tiles of 8" in caplog.text


def test_kernels_that_cannot_run_are_not_used(monkeypatch, caplog):
    attend = pallas_kernels.paged_attention

    def broken(*args, implementation, **rules):
        if implementation != "xla":
            raise RuntimeError("CUDA says no")
        return attend(*args, implementation="xla", **rules)

    monkeypatch.setattr(pallas_kernels, "paged_attention", broken)
    with caplog.at_level(logging.ERROR):
        reason = why_kernels_differ(LAYERS, H200, implementation="reference")
    assert reason == "running them raised RuntimeError"
    assert "CUDA says no" in caplog.text


def test_cpu_leaves_the_choice_to_dispatch_and_xla_is_taken_at_its_word():
    device = jax.devices("cpu")[0]
    choice = choose_implementation("auto", LAYERS, PRODUCTS, device)
    assert choice.implementation is None
    assert choice.why_no_kernels == "no Mosaic body is written for the platform 'cpu'."
    choice = choose_implementation("xla", LAYERS, PRODUCTS, device)
    assert choice == ("xla", "--kernels xla is set.", ())


def test_operations_without_a_kernel_are_named_in_the_choice(monkeypatch):
    """A model's shapes may fit the kernels of some operations only."""

    def check(layers, target):
        late = dispatch.LateBody(module="late", function="f")
        return dispatch.preferred_body("paged_attention", {"mosaic_gpu": late}, target) and None

    monkeypatch.setattr(kernel_check, "target_misfit", lambda target: None)
    monkeypatch.setattr(dispatch, "target_misfit", lambda target: None)
    monkeypatch.setattr(dispatch.LateBody, "misfit", lambda self: "heads of 80")
    monkeypatch.setattr(kernel_check, "why_kernels_differ", check)
    # Also where an earlier engine of this process has logged it.
    for _ in range(2):
        choice = choose_implementation("auto", LAYERS, (), FakeH200())
        assert choice == (
            None,
            None,
            ("paged_attention runs as plain XLA, not as mosaic_gpu: heads of 80.",),
        )


def test_relative_error_is_of_norms():
    assert relative_error(np.array([3.0, 5.0]), np.array([3.0, 4.0])) == pytest.approx(0.2)
    assert relative_error(np.zeros(2), np.zeros(2)) == 0.0
