"""`GatedAttention`: attention whose output has a factor computed from the layer's input."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from models.cache.format import Pages
from models.config.attention_config import AttentionConfig
from models.forward.layer_context import LayerContext
from models.layers.attention import Attention, Norm
from models.layers.linear import Linear
from models.layers.rotary import Rotate, apply_rotary


class GatedAttention(Attention):
    """Attention whose heads are multiplied by `gate(gate_proj(x))` before the output projection.

    Source: arXiv:2505.06708.
    """

    def __init__(
        self,
        config: AttentionConfig,
        *,
        gate: Callable[[jax.Array], jax.Array],
        is_per_head: bool = False,
        q_norm: nnx.Module | None = None,
        k_norm: nnx.Module | None = None,
        rotate: Rotate = apply_rotary,
        dtype: jnp.dtype,
    ) -> None:
        """Makes the layer with weights to be filled in.

        Args:
            gate: The activation of the gate, such as `jax.nn.sigmoid`.
            is_per_head: Whether each head has one factor. Otherwise each number has its own.
            q_norm: As in `Attention`; so are `k_norm` and `rotate`.
        """
        super().__init__(config, q_norm=q_norm, k_norm=k_norm, rotate=rotate, dtype=dtype)
        factors_per_head = 1 if is_per_head else config.value_head_dim
        self.gate_proj = Linear(
            config.hidden_size,
            config.num_q_heads * factors_per_head,
            axes=(None, "heads"),
            dtype=dtype,
        )
        self.gate = gate

    def __call__(
        self, hidden: jax.Array, pages: Pages, context: LayerContext, *, norm: Norm
    ) -> tuple[jax.Array, Pages]:
        attended, pages = super().__call__(hidden, pages, context, norm=norm)

        def apply_gate(hidden: jax.Array, attended: jax.Array, context: LayerContext) -> jax.Array:
            factors = self.gate_proj(norm(hidden), context).astype(jnp.float32)
            factors = self.gate(factors).astype(attended.dtype)
            return attended * factors.reshape(*attended.shape[:2], -1)

        gated = context.of_kept().by_token(apply_gate, context.kept(hidden), attended)
        return gated, pages
