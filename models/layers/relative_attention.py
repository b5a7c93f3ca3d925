"""`RelativeAttention`: short convolutions of keys and values, and a bias of distances."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.cache.format import Pages
from models.config.relative_attention_config import RelativeAttentionConfig
from models.forward.layer_context import LayerContext, LayerState
from models.layers.attend import attend
from models.layers.attention import split_heads
from models.layers.linear import Linear
from models.layers.residual_convolution import ResidualConvolution
from models.layers.self_attention import Norm
from models.weight_rule import Source, WeightRule


class RelativeAttention(nnx.Module):
    """Attention without rotary positions, over keys and values that were convolved.

    Queries and keys are normed head by head. The bias of a logit depends on the query and on its
    distance to the key. `RelativeAttentionConfig.scale` does not multiply the bias.
    """

    def __init__(
        self,
        config: RelativeAttentionConfig,
        *,
        kernel_size: int,
        norm: Callable[[int], nnx.Module],
        dtype: jnp.dtype,
    ) -> None:
        """Makes the layer with weights to be filled in.

        Args:
            kernel_size: Of both convolutions.
            norm: Makes a norm over the given number of features.
        """
        linear = functools.partial(Linear, config.hidden_size, dtype=dtype)
        q_width, kv_width = (
            num_heads * config.head_dim for num_heads in (config.num_q_heads, config.num_kv_heads)
        )
        self.q_proj = linear(q_width, axes=(None, "heads"))
        self.k_proj = linear(kv_width, axes=(None, "kv_heads"))
        self.v_proj = linear(kv_width, axes=(None, "kv_heads"))
        self.r_proj = linear(config.num_q_heads * config.num_profiles, axes=(None, "heads"))
        self.o_proj = Linear(q_width, config.hidden_size, axes=("heads", None), dtype=dtype)
        self.q_norm, self.k_norm = norm(config.head_dim), norm(config.head_dim)
        self.k_sconv = ResidualConvolution(kv_width, kernel_size)
        self.v_sconv = ResidualConvolution(kv_width, kernel_size)
        self.rel_logits_proj = DistanceProfiles(
            config.num_profiles, config.num_distances, dtype=dtype
        )
        self.config = config

    def __call__(
        self,
        hidden: jax.Array,  # f[num_tokens, hidden]
        windows: tuple[jax.Array, jax.Array],  # of keys and values, as in `ResidualConvolution`
        state: LayerState,
        pages: Pages,
        context: LayerContext,
        *,
        norm: Norm,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array], Pages]:
        """Attends with `norm(hidden)`, without the output projection (`project_out`).

        Returns:
            The heads' outputs f[num_tokens, num_q_heads, head_dim], the windows after the step, and
            the pages with the step's keys and values.
        """

        def project(hidden: jax.Array, context: LayerContext) -> tuple[jax.Array, ...]:
            normed = norm(hidden)
            q, factors = self._queries(normed, context)
            return q, factors, self.k_proj(normed, context), self.v_proj(normed, context)

        q, factors, k, v = context.by_token(project, hidden)
        k, k_window = self.k_sconv(k, windows[0], state, context)
        v, v_window = self.v_sconv(v, windows[1], state, context)
        head_dim = self.config.head_dim
        attended, pages = attend(
            *(self.config, q, (self.k_norm(split_heads(k, head_dim)), split_heads(v, head_dim))),
            *(pages, context),
            distance_bias=(factors, self.rel_logits_proj.profiles()),
        )
        return attended, (k_window, v_window), pages

    def project_out(
        self,
        attended: jax.Array,  # f[num_rows, num_q_heads, head_dim]
        context: LayerContext,
    ) -> jax.Array:  # f[num_rows, hidden]
        return self.o_proj(attended.reshape(attended.shape[0], -1), context)

    def _queries(
        self,
        normed: jax.Array,  # f[num_rows, hidden]
        context: LayerContext,
    ) -> tuple[jax.Array, jax.Array]:
        """Queries f[num_rows, num_q_heads, head_dim], and factors of profiles f[..., profiles]."""
        config = self.config
        q = self.q_norm(split_heads(self.q_proj(normed, context), config.head_dim))
        factors = split_heads(self.r_proj(normed, context), config.num_profiles)
        if config.log_floor is None:
            return q, factors
        positions = context.of_rows(context.batch.positions)
        lengths = (positions + 1).astype(jnp.float32) / config.log_floor
        scale = 1.0 + config.log_rate * jnp.log(jnp.maximum(lengths, 1.0))[:, None, None]
        return tuple((x.astype(jnp.float32) * scale).astype(x.dtype) for x in (q, factors))


class DistanceProfiles(nnx.Module):
    """Biases by distance, [num_profiles, num_distances].

    They are stored as a vector, because the CPU's loop over layers copies only vectors
    (`models/decoders/chosen_layer.py`).
    """

    def __init__(self, num_profiles: int, num_distances: int, *, dtype: jnp.dtype) -> None:
        """Makes the layer with weights to be filled in."""
        self.shape = (num_profiles, num_distances)
        self.proj = nnx.Param(jnp.zeros((num_profiles * num_distances,), dtype))

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`."""
        source = Source(name=f"{name}.proj", shape=self.shape)
        rule = WeightRule(sources=(source,), layout="vector", axes=(None,), combine=_as_vector)
        return {"proj": rule}

    def profiles(self) -> jax.Array:  # f[num_profiles, num_distances]
        return self.proj[...].reshape(self.shape)


def _as_vector(weights_np: Sequence[np.ndarray]) -> np.ndarray:
    return weights_np[0].reshape(-1)
