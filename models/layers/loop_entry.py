"""`LoopEntry`: what a model does before each pass through layers that run several times."""

from dataclasses import dataclass

import jax
from flax import nnx

from models.cache.format import Pages
from models.forward.carry import Carry
from models.forward.layer_context import LayerContext


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LoopedCarry(Carry):
    """The residual stream, and the input of the loops."""

    loop_input: jax.Array  # f[num_tokens, hidden]


class LoopEntry(nnx.Module):
    """Adds the input of the loops to the normed hidden states, before each loop.

    The first loop's normed hidden states are this input.
    """

    def __init__(self, *, norm: nnx.Module, is_first: bool) -> None:
        self.norm = norm
        self.is_first = is_first

    def __call__(
        self, carry: LoopedCarry, pages: Pages, context: LayerContext
    ) -> tuple[LoopedCarry, Pages]:
        normed = self.norm(context.kept(carry.hidden))
        loop_input = normed if self.is_first else context.kept(carry.loop_input)
        return LoopedCarry(hidden=normed + loop_input, loop_input=loop_input), pages
