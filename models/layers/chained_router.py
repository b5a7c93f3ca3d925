"""`ChainedRouter`: scores experts, and passes its state to the router of the next layer."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from models.layers.factors import Factors
from models.layers.mlp import activate
from models.layers.rms_norm import RMSNorm
from models.layers.routing import Router, Routing
from models.weight_rule import Source, WeightRule


class RouterMLP(nnx.Module):
    """Scores of experts: a norm, two layers with GELU, and a projection."""

    def __init__(self, width: int, num_choices: int, *, eps: float, dtype: jnp.dtype) -> None:
        """Makes the layer with weights to be filled in."""
        self.norm = RMSNorm(width, eps=eps, dtype=dtype)
        self.fc1, self.fc2 = (Router(width, width, use_bias=True, dtype=dtype) for _ in range(2))
        self.out_proj = Router(width, num_choices, dtype=dtype)

    def __call__(
        self,
        x: jax.Array,  # f[num_rows, width]
    ) -> jax.Array:  # f32[num_rows, num_choices]
        inner = self.norm(x)
        for linear in (self.fc1, self.fc2):
            inner = activate(linear.scores(inner).astype(x.dtype), "gelu")
        return self.out_proj.scores(inner)


class ChainedRouter(nnx.Module):
    """Scores experts with an MLP over a narrow state.

    The state is a projection of the hidden states, plus the scaled state of the previous layer's
    router. The corrections are as in `CorrectedRouter`.

    Source: huggingface.co/docs/transformers/model_doc/zaya.
    """

    def __init__(
        self, hidden_size: int, width: int, num_choices: int, *, eps: float, dtype: jnp.dtype
    ) -> None:
        """Makes the layer with weights to be filled in.

        Args:
            width: Of the state.
            num_choices: Scores per token: one per expert, and one per other choice of the layer.
        """
        self.down_proj = Router(hidden_size, width, use_bias=True, dtype=dtype)
        self.router_states_scale = Factors(width, dtype=dtype)
        self.router_mlp = RouterMLP(width, num_choices, eps=eps, dtype=dtype)
        self.correction_bias = nnx.Param(jnp.zeros((num_choices,), jnp.float32))

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`."""
        shape = self.correction_bias.get_value().shape
        source = Source(name=f"{name}.balancing_biases", shape=shape)
        return {"correction_bias": WeightRule(sources=(source,), layout="vector", axes=(None,))}

    def route(
        self,
        x: jax.Array,  # f[num_rows, hidden]
        previous: jax.Array,  # f[num_rows, width], the state of the layer before; zeros if none
        choose: Callable[..., Routing],
    ) -> tuple[Routing, jax.Array]:
        """Returns `choose(scores, correction)`, and the state f[num_rows, width]."""
        state = self.down_proj.scores(x).astype(x.dtype) + self.router_states_scale(previous)
        return choose(self.router_mlp(state), self.correction_bias[...]), state
