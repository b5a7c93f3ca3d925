"""The self-test of attention notices kernels that do not compute what XLA computes."""

import dataclasses
import logging

import numpy as np
import pytest

import pallas_kernels
from models import AttentionConfig, AttentionFormat, RopeConfig
from models.cache.attention_self_test import MAX_WINDOW, AttentionSelfTest
from paxkv.runner.programs.kernel_check import why_kernels_differ

FORMAT = AttentionFormat(num_kv_heads=2, head_dim=16, dtype="float32")
H200 = pallas_kernels.Target(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")
FULL = AttentionConfig(
    hidden_size=64, num_q_heads=4, num_kv_heads=2, head_dim=16, rope=RopeConfig(), scale=0.25
)


def checked(*layers, cache=FORMAT, block_size=16):
    """The tests of layers that all store keys and values in one way."""
    return tuple(test for layer in layers for test in cache.self_tests(layer, block_size))


# With sinks, and with limits so large that the check lowers them for its short sequences.
LIMITED = dataclasses.replace(FULL, sliding_window=4096, soft_cap=50.0, has_sinks=True)
LAYERS = checked(FULL, LIMITED)


_run = AttentionSelfTest._run
_results = {}


def kernels_of_layers():
    return pallas_kernels.paged_attention, pallas_kernels.kv_scatter, pallas_kernels.block_copy


RIGHT_KERNELS = kernels_of_layers()


def run_once(test, inputs, chosen):
    """`AttentionSelfTest._run`, except that right results are computed once for all tests here.

    Tests replace kernels by wrong ones, but never those of XLA.
    """
    implementation = chosen["implementation"]
    if implementation != "xla" and kernels_of_layers() != RIGHT_KERNELS:
        return _run(test, inputs, chosen)
    if (test, implementation) not in _results:
        _results[test, implementation] = _run(test, inputs, chosen)
    return _results[test, implementation]


@pytest.fixture(autouse=True)
def right_layers_run_once(monkeypatch):
    monkeypatch.setattr(AttentionSelfTest, "_run", run_once)


def test_requests_hold_every_block_of_the_pool_once_and_not_the_null_block():
    inputs = LAYERS[0]._random_inputs()
    num_blocks = inputs["kv_cache"].shape[1] // 2
    assert sorted(inputs["block_tables"].ravel().tolist()) == list(range(1, num_blocks))


def test_right_kernels_pass():
    assert why_kernels_differ(LAYERS, H200, implementation="reference") is None


def spoil_layer(monkeypatch, spoil, *, is_spoiled=lambda test: True):
    """Makes the attention of every body but XLA's wrong where `is_spoiled`."""

    def run_spoiled(test, inputs, chosen):
        out_np, *caches_np = run_once(test, inputs, chosen | {"implementation": "xla"})
        if chosen["implementation"] != "xla" and is_spoiled(test):
            out_np = spoil(out_np)
        return (out_np, *caches_np)

    monkeypatch.setattr(AttentionSelfTest, "_run", run_spoiled)


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
    is_spoiled = lambda test: test.sliding_window == MAX_WINDOW  # noqa: E731
    spoil_layer(monkeypatch, lambda out_np: -out_np, is_spoiled=is_spoiled)
    reason = why_kernels_differ(LAYERS, H200, implementation="reference")
    assert f"'sliding_window': {MAX_WINDOW}" in reason


def test_layers_of_other_numbers_of_heads_are_tried(monkeypatch):
    tried = []

    def run(test, inputs, chosen):
        tried.append(inputs["q"].shape[1])
        return np.ones(1), np.ones((1, 2))

    monkeypatch.setattr(AttentionSelfTest, "_run", run)
    layers = checked(FULL, dataclasses.replace(FULL, num_q_heads=8), FULL)
    assert why_kernels_differ(layers, H200, implementation="reference") is None
    assert sorted(tried) == [4, 4, 8, 8]  # each with XLA and with the kernels


def test_layers_are_tried_with_keys_and_values_as_they_are_stored(monkeypatch):
    """In wider heads, or in blocks of another size."""
    tried = []

    def run(test, inputs, chosen):
        kv_cache = inputs["kv_cache"]
        tried.append((kv_cache.shape[2:], str(kv_cache.dtype)))
        assert inputs["q"].shape[-1] == inputs["v"].shape[-1] == kv_cache.shape[-1]
        return np.ones(1), np.ones((1, 2))

    monkeypatch.setattr(AttentionSelfTest, "_run", run)
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


# A missing window or chunk changes more than one that is one token too long, so it is a slow test.
@pytest.mark.parametrize(
    "spoil_rules",
    [
        pytest.param(lambda rules: {"soft_cap": None}, id="no soft cap"),
        pytest.param(
            lambda rules: {"sliding_window": None}, id="no window", marks=pytest.mark.slow
        ),
        pytest.param(
            lambda rules: {"sliding_window": rules["sliding_window"] + 1}, id="window one too long"
        ),
    ],
)
def test_far_limits_that_a_kernel_gets_wrong_are_noticed(monkeypatch, spoil_rules):
    attend = pallas_kernels.paged_attention

    def spoiled(*args, implementation, **rules):
        changes = {} if implementation == "xla" else spoil_rules(rules)
        return attend(*args, implementation=implementation, **(rules | changes))

    monkeypatch.setattr(pallas_kernels, "paged_attention", spoiled)
    reason = why_kernels_differ(checked(LIMITED), H200, implementation="reference")
    assert "differs from XLA's" in reason


@pytest.mark.parametrize(
    ("layer", "spoil_rules"),
    [
        pytest.param(LIMITED, lambda rules: {"sinks": None}, id="no sinks"),
        pytest.param(
            LIMITED,
            lambda rules: {"sinks": rules["sinks"][::-1]},
            id="sinks of other heads",
        ),
        pytest.param(
            dataclasses.replace(FULL, chunk_size=8192),
            lambda rules: {"chunk_size": None},
            id="no chunks",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            dataclasses.replace(FULL, chunk_size=8192),
            lambda rules: {"chunk_size": rules["chunk_size"] + 1},
            id="chunks one too long",
        ),
    ],
)
def test_sinks_and_chunks_that_a_kernel_gets_wrong_are_noticed(monkeypatch, layer, spoil_rules):
    attend = pallas_kernels.paged_attention

    def spoiled(*args, implementation, **rules):
        has_limit = rules["sinks"] is not None or rules["chunk_size"] is not None
        changes = spoil_rules(rules) if has_limit and implementation != "xla" else {}
        return attend(*args, implementation=implementation, **(rules | changes))

    # The full layer is last: it must not be tried in place of the other one.
    layers = checked(layer, FULL)
    assert why_kernels_differ(layers, H200, implementation="reference") is None
    monkeypatch.setattr(pallas_kernels, "paged_attention", spoiled)
    reason = why_kernels_differ(layers, H200, implementation="reference")
    assert "differs from XLA's" in reason
    assert ("sinks" in reason) == layer.has_sinks


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
