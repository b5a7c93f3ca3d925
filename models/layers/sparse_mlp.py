"""Experts in place of the MLP: a router, its experts, and in some families shared experts."""

import re
from collections.abc import Callable, Mapping

import jax
from flax import nnx

from models.forward.layer_context import LayerContext
from models.layers.experts import Experts
from models.layers.linear import Linear
from models.layers.mlp import GatedMLP
from models.layers.routing import Router, Routing
from models.weight_rule import WeightRule, with_renamed_sources

# Mixtral's names for the projections of an expert.
_MIXTRAL_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


class SparseMLP(nnx.Module):
    """A router scores the experts for each row, and the row goes through the chosen experts."""

    def __init__(
        self,
        *,
        gate: Router,
        choose: Callable[..., Routing],
        experts: Experts,
    ) -> None:
        """Makes the block.

        Args:
            choose: The argument of `gate.route`. It must be frozen and hashable, so that `kind_of`
                gives equal values for layers that choose in the same way.
        """
        self.gate = gate
        self.choose = choose
        self.experts = experts

    def __call__(
        self,
        x: jax.Array,  # f[num_rows, hidden], of the tokens of `context.of_rows`
        context: LayerContext,
    ) -> jax.Array:  # f[num_rows, hidden]
        return self.experts(x, self.gate.route(x, self.choose), context)


class SharedExpertsMLP(SparseMLP):
    """Each row also goes through shared experts, which are stored as one MLP.

    Source: DeepSeekMoE, arXiv:2401.06066.
    """

    def __init__(
        self,
        *,
        gate: Router,
        choose: Callable[..., Routing],
        experts: Experts,
        shared_experts: GatedMLP,
    ) -> None:
        """Makes the block; the other arguments are as in `SparseMLP`."""
        super().__init__(gate=gate, choose=choose, experts=experts)
        self.shared_experts = shared_experts

    def __call__(
        self,
        x: jax.Array,  # f[num_rows, hidden], of the tokens of `context.of_rows`
        context: LayerContext,
    ) -> jax.Array:  # f[num_rows, hidden]
        return super().__call__(x, context) + self.shared_experts(x, context)


class GatedSharedExpertMLP(SparseMLP):
    """Each row also goes through one shared expert, scaled by `sigmoid(shared_expert_gate(x))`.

    Source: Qwen2-MoE.
    """

    def __init__(
        self,
        *,
        gate: Router,
        choose: Callable[..., Routing],
        experts: Experts,
        shared_expert: GatedMLP,
        shared_expert_gate: Linear,
    ) -> None:
        """Makes the block.

        Args:
            choose: See `SparseMLP`.
            shared_expert_gate: Maps the hidden size to one number.
        """
        super().__init__(gate=gate, choose=choose, experts=experts)
        self.shared_expert = shared_expert
        self.shared_expert_gate = shared_expert_gate

    def __call__(
        self,
        x: jax.Array,  # f[num_rows, hidden], of the tokens of `context.of_rows`
        context: LayerContext,
    ) -> jax.Array:  # f[num_rows, hidden]
        share = jax.nn.sigmoid(self.shared_expert_gate(x, context))
        return super().__call__(x, context) + share * self.shared_expert(x, context)


def renamed_experts(rules: Mapping[str, WeightRule]) -> dict[str, WeightRule]:
    """The same rules, with Mixtral's names for the projections of every expert.

    Example: "model.layers.0.mlp.experts.3.up_proj.weight" becomes
        "model.layers.0.mlp.experts.3.w3.weight".
    """
    return with_renamed_sources(
        rules,
        lambda name: re.sub(
            r"(\.mlp\.experts\.\d+\.)(\w+)", lambda found: found[1] + _MIXTRAL_NAMES[found[2]], name
        ),
    )


def block_sparse_moe_rules(rules: Mapping[str, WeightRule]) -> dict[str, WeightRule]:
    """The same rules, with Mixtral's names for the tensors of every `SparseMLP`.

    Example: "model.layers.0.mlp.experts.3.up_proj.weight" becomes
        "model.layers.0.block_sparse_moe.experts.3.w3.weight".
    """
    return with_renamed_sources(
        renamed_experts(rules), lambda name: name.replace(".mlp.", ".block_sparse_moe.")
    )
