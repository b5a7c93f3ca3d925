"""Further rules by which families choose the experts of a token and their weights."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from models.layers.routing import Routing, SigmoidTopK


@dataclass(frozen=True, slots=True, kw_only=True)
class SigmoidOfTopK:
    """Chooses the `top_k` experts with the largest scores. The weights are sigmoids of the scores.

    Args:
        normalizes: Whether the weights are scaled to a sum of 1.
    """

    top_k: int
    normalizes: bool

    def __call__(
        self,
        scores: jax.Array,  # f32[num_rows, num_experts]
    ) -> Routing:
        best, expert_ids = lax.top_k(scores, self.top_k)
        return Routing(expert_ids, _scaled(jax.nn.sigmoid(best), self.normalizes))


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectedScoresTopK:
    """As `SigmoidOfTopK`, but chooses by the scores plus a correction (Kolibri)."""

    top_k: int
    normalizes: bool

    def __call__(
        self,
        scores: jax.Array,  # f32[num_rows, num_experts]
        correction: jax.Array,  # f32[num_experts]
    ) -> Routing:
        _, expert_ids = lax.top_k(scores + correction, self.top_k)
        weights = jax.nn.sigmoid(jnp.take_along_axis(scores, expert_ids, axis=-1))
        return Routing(expert_ids, _scaled(weights, self.normalizes))


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectedSoftmaxTopK:
    """Chooses the `top_k` experts with the largest softmax plus correction (ERNIE 4.5).

    The weights are the softmax without the correction, divided by their sum.

    Args:
        min_sum: The smallest number by which the weights are divided.
    """

    top_k: int
    min_sum: float

    def __call__(
        self,
        scores: jax.Array,  # f32[num_rows, num_experts]
        correction: jax.Array,  # f32[num_experts]
    ) -> Routing:
        likely = jax.nn.softmax(scores, axis=-1)
        _, expert_ids = lax.top_k(likely + correction, self.top_k)
        weights = jnp.take_along_axis(likely, expert_ids, axis=-1)
        total = weights.sum(axis=-1, keepdims=True)
        return Routing(expert_ids, weights / jnp.maximum(total, self.min_sum))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledCorrectedSoftmaxTopK:
    """As `CorrectedSoftmaxTopK`, but the weights are not divided by their sum (LongCat-Flash).

    Args:
        factor: The weights are the softmaxes without the correction, multiplied by it.
    """

    top_k: int
    factor: float

    def __call__(
        self,
        scores: jax.Array,  # f32[num_rows, num_experts]
        correction: jax.Array,  # f32[num_experts]
    ) -> Routing:
        likely = jax.nn.softmax(scores, axis=-1)
        _, expert_ids = lax.top_k(likely + correction, self.top_k)
        return Routing(expert_ids, jnp.take_along_axis(likely, expert_ids, axis=-1) * self.factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedSoftmaxTopK:
    """Chooses the `top_k` experts with the largest softmax over all experts (DeepSeek V2).

    The experts form `num_groups` groups of equal size. Only experts of `num_kept_groups` groups can
    be chosen: the groups whose best experts have the largest softmax.

    Args:
        factor: The weights are the softmaxes, multiplied by it.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.2.2.
    """

    top_k: int
    factor: float = 1.0
    num_groups: int = 1
    num_kept_groups: int = 1

    def __call__(
        self,
        scores: jax.Array,  # f32[num_rows, num_experts]
    ) -> Routing:
        likely = jax.nn.softmax(scores, axis=-1)
        if self.num_kept_groups < self.num_groups:
            grouped = likely.reshape(likely.shape[0], self.num_groups, -1)
            likely = _in_best_groups(grouped, grouped.max(axis=-1), self.num_kept_groups)
        weights, expert_ids = lax.top_k(likely, self.top_k)
        return Routing(expert_ids, weights * self.factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairGroupedSoftmaxTopK:
    """As `GroupedSoftmaxTopK`, but two experts decide which groups are kept (Mistral 4).

    The score of a group is the sum of the softmaxes of its two best experts. The groups with the
    highest scores are kept.

    Args:
        normalizes: Whether the softmaxes of the chosen experts are first scaled to a sum of 1.
        factor: The weights are multiplied by it.
    """

    top_k: int
    normalizes: bool
    factor: float = 1.0
    num_groups: int = 1
    num_kept_groups: int = 1

    def __call__(
        self,
        scores: jax.Array,  # f32[num_rows, num_experts]
    ) -> Routing:
        likely = jax.nn.softmax(scores, axis=-1)
        if self.num_kept_groups < self.num_groups:
            grouped = likely.reshape(likely.shape[0], self.num_groups, -1)
            best_two, _ = lax.top_k(grouped, 2)
            likely = _in_best_groups(grouped, best_two.sum(axis=-1), self.num_kept_groups)
        weights, expert_ids = lax.top_k(likely, self.top_k)
        return Routing(expert_ids, _scaled(weights, self.normalizes) * self.factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftCappedSigmoidTopK(SigmoidTopK):
    """`SigmoidTopK` of scores that are first bound to `cap * tanh(score / cap)` (Laguna)."""

    cap: float

    def __call__(
        self,
        scores: jax.Array,  # f32[num_rows, num_experts]
        bias: jax.Array,  # f32[num_experts]
    ) -> Routing:
        capped = self.cap * jnp.tanh(scores / self.cap)
        return SigmoidTopK.__call__(self, capped, bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseMixer:
    """Chooses the two best experts; the weights are softmaxes over scores near the best (Phi-MoE).

    The softmax of the first expert is over all scores near its own, and that of the second expert
    is over the scores without the first one. A score is near the best if their difference is at
    most `2 * tolerance`, as a share of the larger one of the best score and the score's size.

    Source: arXiv:2409.12136.
    """

    tolerance: float

    def __call__(
        self,
        scores: jax.Array,  # f32[num_rows, num_experts]
    ) -> Routing:
        experts = jnp.arange(scores.shape[-1], dtype=jnp.int32)
        first = jnp.argmax(scores, axis=-1).astype(jnp.int32)
        first_weight = self._weight_of_best(scores, scores)
        others = jnp.where(experts == first[:, None], -jnp.inf, scores)
        second = jnp.argmax(others, axis=-1).astype(jnp.int32)
        second_weight = self._weight_of_best(others, scores)
        return Routing(
            jnp.stack([first, second], axis=-1), jnp.stack([first_weight, second_weight], axis=-1)
        )

    def _weight_of_best(self, eligible: jax.Array, scores: jax.Array) -> jax.Array:  # f32[num_rows]
        best = eligible.max(axis=-1, keepdims=True)
        distance = (best - scores) / jnp.maximum(jnp.abs(scores), best)
        near = jnp.where(distance > 2 * self.tolerance, -jnp.inf, eligible)
        return 1 / jnp.exp(near - best).sum(axis=-1)


def _in_best_groups(
    grouped: jax.Array,  # f32[num_rows, num_groups, group_size]
    group_scores: jax.Array,  # f32[num_rows, num_groups]
    num_kept: int,
) -> jax.Array:  # f32[num_rows, num_experts]
    """0 for experts outside the `num_kept` groups with the largest scores."""
    _, kept = lax.top_k(group_scores, num_kept)
    is_kept = (kept[:, :, None] == jnp.arange(grouped.shape[1])).any(axis=1)
    return jnp.where(is_kept[:, :, None], grouped, 0.0).reshape(grouped.shape[0], -1)


def _scaled(weights: jax.Array, normalizes: bool) -> jax.Array:  # f32[num_rows, top_k]
    return weights / weights.sum(axis=-1, keepdims=True) if normalizes else weights
