"""Every row goes only through its chosen experts; packed weights of checkpoints are read."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.errors import WeightMismatchError
from models.forward.layer_context import LayerContext
from models.layers.experts import Experts, packed_gate_up_rules, packed_or_single_rules
from models.layers.routing import Routing
from models.weight_rule import Source, WeightRule, rules_of_layers
from tests import on_device
from tests.models.plain_context import plain_context

NUM_EXPERTS, HIDDEN, INNER = 4, 6, 5


def make_experts(*, use_bias: bool, seed: int = 0) -> Experts:
    """With random weights and biases."""
    experts = Experts(
        NUM_EXPERTS,
        HIDDEN,
        INNER,
        activation="silu",
        use_bias=use_bias,
        dtype=jnp.dtype("float32"),
    )
    rng = np.random.default_rng(seed)
    for linear in (experts.gate_proj, experts.up_proj, experts.down_proj):
        for param in (linear.kernel, linear.bias):
            if param is not None:
                values = rng.standard_normal(param.get_value().shape)
                param.set_value(on_device.array(values, jnp.float32))
    return experts


def run(experts: Experts, x: jax.Array, routing: Routing, context: LayerContext) -> jax.Array:
    """The layer as one program, which compiles faster than each of its operations alone."""
    return jax.jit(lambda x, routing: experts(x, routing, context))(x, routing)


def through_expert(experts: Experts, row_np: np.ndarray, expert_id: int) -> np.ndarray:
    """One row through one expert, in float64."""

    def linear(layer: nnx.Module, x_np: np.ndarray) -> np.ndarray:
        y_np = x_np @ np.asarray(layer.kernel[...][expert_id], np.float64)
        return y_np if layer.bias is None else y_np + np.asarray(layer.bias[...][expert_id])

    gate_np = linear(experts.gate_proj, row_np)
    joined_np = gate_np / (1 + np.exp(-gate_np)) * linear(experts.up_proj, row_np)
    return linear(experts.down_proj, joined_np)


@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize(
    "expert_ids",
    [
        [[0, 1], [2, 3], [1, 0], [3, 1], [0, 2]],
        # All rows choose the same two, and the others have none.
        [[3, 1]] * 5,
    ],
)
def test_each_row_is_the_weighted_sum_of_its_experts(expert_ids, use_bias):
    experts = make_experts(use_bias=use_bias)
    rng = np.random.default_rng(1)
    x_np = rng.standard_normal((5, HIDDEN)).astype(np.float32)
    weights_np = rng.uniform(0.1, 1, (5, 2)).astype(np.float32)
    routing = Routing(on_device.array(expert_ids, jnp.int32), on_device.array(weights_np))
    expected = [
        sum(
            weight * through_expert(experts, row_np, expert_id)
            for expert_id, weight in zip(chosen, row_weights, strict=True)
        )
        for row_np, chosen, row_weights in zip(x_np, expert_ids, weights_np, strict=True)
    ]
    got = run(experts, on_device.array(x_np), routing, plain_context(5))
    np.testing.assert_allclose(got, np.array(expected), rtol=1e-5, atol=1e-5)


def test_padding_goes_through_no_expert_and_changes_no_other_row():
    experts = make_experts(use_bias=True)
    rng = np.random.default_rng(2)
    x = on_device.array(rng.standard_normal((4, HIDDEN)), jnp.float32)
    routing = Routing(
        on_device.array([[0], [1], [1], [0]], jnp.int32), on_device.ones((4, 1), jnp.float32)
    )
    context = plain_context(4)
    # Two requests of one token each, and two rows of padding.
    batch = dataclasses.replace(
        context.batch, query_start_loc=on_device.array([0, 1, 2], jnp.int32)
    )
    padded = dataclasses.replace(context, batch=batch)
    got = np.asarray(run(experts, x.at[2:].set(jnp.nan), routing, padded))
    np.testing.assert_array_equal(got[2:], 0)
    whole = np.asarray(run(experts, x, routing, context))
    np.testing.assert_allclose(got[:2], whole[:2], rtol=1e-6)
    assert np.abs(whole[2:]).min() > 0


class Layer(nnx.Module):
    """Experts at the place where a checkpoint has them."""

    def __init__(self) -> None:
        self.experts = make_experts(use_bias=False)


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_packed_weights_make_the_same_parameters_as_single_experts(is_interleaved, is_turned):
    rules = rules_of_layers(Layer(), prefix="model.")
    packed_rules = packed_gate_up_rules(rules, is_interleaved=is_interleaved, is_turned=is_turned)
    rng = np.random.default_rng(3)
    single_np = {
        source.name: rng.standard_normal(source.shape)
        for rule in rules.values()
        for source in rule.sources
    }
    gate_np, up_np, down_np = (
        np.stack([single_np[f"model.experts.{expert}.{name}.weight"] for expert in range(4)])
        for name in ("gate_proj", "up_proj", "down_proj")
    )
    if is_interleaved:
        gate_up_np = np.stack([gate_np, up_np], axis=2).reshape(NUM_EXPERTS, 2 * INNER, HIDDEN)
    else:
        gate_up_np = np.concatenate([gate_np, up_np], axis=1)
    packed_np = {"model.experts.gate_up_proj": gate_up_np, "model.experts.down_proj": down_np}
    if is_turned:
        packed_np = {name: weight_np.transpose(0, 2, 1) for name, weight_np in packed_np.items()}
    for name, rule in rules.items():
        expected = rule.combined([single_np[source.name] for source in rule.sources])
        (source,) = packed_rules[name].sources
        assert packed_np[source.name].shape == source.shape
        got = packed_rules[name].combined([packed_np[source.name]])
        np.testing.assert_array_equal(got, expected)


def test_experts_may_be_packed_or_single_but_not_incomplete():
    rules = rules_of_layers(Layer(), prefix="model.")
    packed = packed_gate_up_rules(rules)
    for name, rule in packed_or_single_rules(rules).items():
        assert rule.sources[0].name == packed[name].sources[0].name
        assert all(source.is_optional for source in rule.sources)
        single_np = [np.full(source.shape, idx) for idx, source in enumerate(rule.sources[1:])]
        np.testing.assert_array_equal(rule.combined(single_np), np.stack(single_np))
        packed_np = np.arange(np.prod(rule.sources[0].shape)).reshape(rule.sources[0].shape)
        np.testing.assert_array_equal(
            rule.combined([packed_np]), packed[name].combined([packed_np])
        )
        for some_np in ([], single_np[:2], [packed_np, single_np[0]]):
            with pytest.raises(WeightMismatchError, match="of the 4 tensors model.experts.0."):
                rule.combined(some_np)


def test_rules_of_other_parameters_stay():
    table = WeightRule(
        sources=(Source(name="embed", shape=(2, 3)),), layout="table", axes=(None, None)
    )
    assert packed_gate_up_rules({"embedding": table}) == {"embedding": table}
