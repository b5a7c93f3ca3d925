"""Routers, and the rules by which families choose the experts of a token and their weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from models.layers.linear import Linear
from models.weight_rule import Source, WeightRule


class Routing(NamedTuple):
    """The experts that each row goes through. A row lists an expert at most once."""

    expert_ids: jax.Array  # i32[num_rows, top_k], in [0, num_experts)
    weights: jax.Array  # f32[num_rows, top_k], the factor of each expert's output


class Router(Linear):
    """Computes a score for each expert.

    Its kernel and scores are never rounded, because a small error would choose other experts.
    """

    def scores(
        self,
        x: jax.Array,  # f[num_rows, hidden]
    ) -> jax.Array:  # f32[num_rows, num_experts]
        y = self.product(x)
        return y if self.bias is None else y + self.bias[...].astype(jnp.float32)

    def route(
        self,
        x: jax.Array,  # f[num_rows, hidden]
        choose: Callable[..., Routing],
    ) -> Routing:
        """Chooses the experts of each row: returns `choose(scores)`."""
        return choose(self.scores(x))


class CorrectedRouter(Router):
    """A router with a correction term for each expert.

    The correction changes which experts are chosen. It does not change the weights of their
    outputs. The router's parameters are float32, whatever dtype the other parameters have, as in
    transformers.

    Source: DeepSeek-V3, arXiv:2412.19437, section 2.1.2.
    """

    def __init__(self, hidden_size: int, num_experts: int) -> None:
        super().__init__(hidden_size, num_experts, dtype=jnp.dtype("float32"))
        # Training changes the correction in steps of 0.001, and bfloat16 would lose most of them.
        self.correction_bias = nnx.Param(jnp.zeros((num_experts,), jnp.float32))

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`."""
        shape = self.correction_bias.get_value().shape
        source = Source(name=f"{name}.e_score_correction_bias", shape=shape)
        rule = WeightRule(sources=(source,), layout="vector", axes=(None,))
        return super().weight_rules(name) | {"correction_bias": rule}

    def route(
        self,
        x: jax.Array,  # f[num_rows, hidden]
        choose: Callable[..., Routing],
    ) -> Routing:
        """Chooses the experts of each row: returns `choose(scores, correction)`.

        Args:
            choose: Such as `SigmoidTopK`.
        """
        return choose(self.scores(x), self.correction_bias[...])


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxTopK:
    """Chooses the `top_k` experts with the largest softmax over all experts.

    Args:
        normalizes: Whether the weights are scaled to a sum of 1. They then equal the softmax over
            the chosen experts alone.
    """

    top_k: int
    normalizes: bool

    def __call__(
        self,
        scores: jax.Array,  # f32[num_rows, num_experts]
    ) -> Routing:
        weights, expert_ids = lax.top_k(jax.nn.softmax(scores, axis=-1), self.top_k)
        if self.normalizes:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        return Routing(expert_ids, weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class SigmoidTopK:
    """Chooses the `top_k` experts with the largest sigmoid plus bias.

    The weights are the sigmoids without the bias. The experts form `num_groups` groups of equal
    size. Only experts of `num_kept_groups` groups can be chosen: the groups whose two best experts
    have the largest sum.

    Args:
        normalizes: Whether the weights are scaled to a sum of 1.
        factor: The weights are multiplied by it, after they have been normalized.
        sum_offset: Added to the sum of the weights before they are divided by it.

    Source: DeepSeek-V3, arXiv:2412.19437, section 2.1.2.
    """

    top_k: int
    normalizes: bool = True
    factor: float = 1.0
    num_groups: int = 1
    num_kept_groups: int = 1
    sum_offset: float = 1e-20

    def __call__(
        self,
        scores: jax.Array,  # f32[num_rows, num_experts]
        bias: jax.Array,  # f32[num_experts]
    ) -> Routing:
        likely = jax.nn.sigmoid(scores)
        ranked = likely + bias
        if self.num_kept_groups < self.num_groups:
            ranked = self._in_kept_groups(ranked)
        _, expert_ids = lax.top_k(ranked, self.top_k)
        weights = jnp.take_along_axis(likely, expert_ids, axis=-1)
        if self.normalizes:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + self.sum_offset)
        return Routing(expert_ids, weights * self.factor)

    def _in_kept_groups(self, ranked: jax.Array) -> jax.Array:  # f32[num_rows, num_experts]
        grouped = ranked.reshape(ranked.shape[0], self.num_groups, -1)
        best_two, _ = lax.top_k(grouped, 2)
        _, kept = lax.top_k(best_two.sum(axis=-1), self.num_kept_groups)
        is_kept = (kept[:, :, None] == jnp.arange(self.num_groups)).any(axis=1)
        return jnp.where(is_kept[:, :, None], grouped, -jnp.inf).reshape(ranked.shape)
