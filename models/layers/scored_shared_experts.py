"""Shared experts whose factors come from the router, as the factors of chosen experts do."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from models.forward.layer_context import LayerContext
from models.layers.experts import Experts
from models.layers.mlp import GatedMLP
from models.layers.routing import Router, Routing
from models.weight_rule import Source, WeightRule


class SharedRouting(NamedTuple):
    """The chosen experts of each row, and the row's factors for the shared experts."""

    routing: Routing
    shared: jax.Array  # f32[num_rows, num_shared]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSigmoidTopK:
    """Chooses the `top_k` experts with the largest sigmoid plus bias.

    The weights are the sigmoids of chosen and shared experts, without the bias, scaled to a sum of
    `factor`.
    """

    top_k: int
    num_shared: int
    factor: float

    def __call__(
        self,
        scores: jax.Array,  # f32[num_rows, num_experts + num_shared]
        bias: jax.Array,  # f32[num_experts]
        scale: jax.Array,  # f32[1], one more factor of all weights
    ) -> SharedRouting:
        likely = jax.nn.sigmoid(scores)
        routed, shared = likely[:, : -self.num_shared], likely[:, -self.num_shared :]
        _, expert_ids = lax.top_k(routed + bias, self.top_k)
        chosen = jnp.take_along_axis(routed, expert_ids, axis=-1)
        total = chosen.sum(axis=-1, keepdims=True) + shared.sum(axis=-1, keepdims=True)
        factor = self.factor * scale / total
        return SharedRouting(Routing(expert_ids, chosen * factor), shared * factor)


class SharedScoresRouter(Router):
    """A router that also scores the shared experts. Only the other experts have a correction.

    Its parameters are float32, whatever dtype the other parameters have.
    """

    def __init__(self, hidden_size: int, num_experts: int, num_shared: int) -> None:
        super().__init__(hidden_size, num_experts + num_shared, dtype=jnp.dtype("float32"))
        self.correction_bias = nnx.Param(jnp.zeros((num_experts,), jnp.float32))
        self.scale = nnx.Param(jnp.ones((1,), jnp.float32))

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`."""
        num_experts = self.correction_bias.get_value().shape
        return super().weight_rules(name) | {
            "correction_bias": _vector_rule(f"{name}.e_score_correction_bias", num_experts),
            "scale": _vector_rule(f"{name}.global_scale", (1,)),
        }

    def route(
        self,
        x: jax.Array,  # f[num_rows, hidden]
        choose: Callable[..., SharedRouting],
    ) -> SharedRouting:
        """Returns `choose(scores, correction, scale)`, such as that of a `SharedSigmoidTopK`."""
        return choose(self.scores(x), self.correction_bias[...], self.scale[...])


class TrainedScaleMLP(GatedMLP):
    """A gated MLP whose output has a trained factor."""

    def __init__(self, *sizes: int, dtype: jnp.dtype, **options: object) -> None:
        super().__init__(*sizes, dtype=dtype, **options)
        self.scale = nnx.Param(jnp.ones((1,), dtype))

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`."""
        return {"scale": _vector_rule(f"{name}.global_scale", (1,))}

    def __call__(self, x: jax.Array, context: LayerContext) -> jax.Array:
        return super().__call__(x, context) * self.scale[...]


class SharedExperts(GatedMLP):
    """Shared experts of equal width, joined into one MLP."""

    def __call__(
        self,
        x: jax.Array,  # f[num_rows, hidden]
        factors: jax.Array,  # f32[num_rows, num_shared]
        context: LayerContext,
    ) -> jax.Array:  # f[num_rows, hidden]
        """The sum of the experts' outputs, with these factors."""
        inner = self._activated(self.gate_proj(x, context)) * self.up_proj(x, context)
        width = inner.shape[1] // factors.shape[1]
        factors = jnp.repeat(factors.astype(inner.dtype), width, axis=1)
        return self.down_proj(inner * factors, context)


class ScoredSharedMLP(nnx.Module):
    """Each row goes through the experts that the router chooses, and through all shared experts."""

    def __init__(
        self,
        *,
        gate: SharedScoresRouter,
        choose: SharedSigmoidTopK,
        experts: Experts,
        shared_experts: SharedExperts,
    ) -> None:
        self.gate = gate
        self.choose = choose
        self.experts = experts
        self.shared_experts = shared_experts

    def __call__(
        self,
        x: jax.Array,  # f[num_rows, hidden], of the tokens of `context.of_rows`
        context: LayerContext,
    ) -> jax.Array:  # f[num_rows, hidden]
        routing, factors = self.gate.route(x, self.choose)
        return self.experts(x, routing, context) + self.shared_experts(x, factors, context)


def packed_shared_rules(rules: dict[str, WeightRule], num_shared: int) -> dict[str, WeightRule]:
    """The rules for checkpoints with one tensor for each projection of all shared experts.

    Args:
        rules: The rules of all parameters of a model, in which modules called `shared_experts` are
            one MLP.
    """
    return {
        name: _packed_rule(rule, num_shared) if ".shared_experts." in name else rule
        for name, rule in rules.items()
    }


def _packed_rule(rule: WeightRule, num_shared: int) -> WeightRule:
    (own,) = rule.sources
    name = own.name.removesuffix(".weight")
    out_features, in_features = own.shape
    if name.endswith(".down_proj"):
        shape, combine = (num_shared, out_features, in_features // num_shared), _side_by_side
    else:
        shape, combine = (num_shared, out_features // num_shared, in_features), np.concatenate
    source = replace(own, name=name, shape=shape)
    return replace(rule, sources=(source,), combine=lambda weights_np: combine(weights_np[0]))


def _side_by_side(weight_np: np.ndarray) -> np.ndarray:
    """[num_shared, hidden, inner] -> [hidden, num_shared * inner]."""
    return np.concatenate(weight_np, axis=1)


def _vector_rule(name: str, shape: tuple[int, ...]) -> WeightRule:
    source = Source(name=name, shape=shape)
    return WeightRule(sources=(source,), layout="vector", axes=(None,))
