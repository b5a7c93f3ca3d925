"""`make_dense_layers`: the decoder layers of families whose layers differ in few parts."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx

from models.config.attention_config import AttentionConfig
from models.config.dense_config import DenseConfig, LayerNormConfig
from models.decoders.layer_loop import Layer
from models.layers.attention import Attention
from models.layers.decoder_layers import PreNormLayer
from models.layers.mlp import MLP, GatedMLP
from models.layers.self_attention import SelfAttention


def make_dense_layers(
    config: DenseConfig | LayerNormConfig,
    *,
    layer: Callable[..., Layer] = PreNormLayer,
    attention: Callable[[AttentionConfig], SelfAttention] | None = None,
    mlp: Callable[..., MLP] = GatedMLP,
    mlp_bias: bool = False,
    norm: Callable[[int], nnx.Module],
    dtype: jnp.dtype,
) -> list[Layer]:
    """Makes a layer for each `AttentionConfig` of the config.

    Args:
        layer: The layer's class. It takes the arguments of `PreNormLayer`.
        attention: Makes the attention of one layer. None: `Attention` without norms.
        mlp: The class of the MLP. It takes the arguments of `GatedMLP`.
        mlp_bias: Whether the MLP has biases.
        norm: Makes a norm over the given number of features.
    """
    if attention is None:
        attention = functools.partial(Attention, dtype=dtype)
    return [
        layer(
            attention=attention(of_layer),
            mlp=mlp(
                config.hidden_size,
                config.intermediate_size,
                activation=config.hidden_act,
                use_bias=mlp_bias,
                dtype=dtype,
            ),
            norm=functools.partial(norm, config.hidden_size),
        )
        for of_layer in config.attention
    ]


def make_head_normed_attention(
    config: AttentionConfig,
    *,
    norm: Callable[[int], nnx.Module],
    attention: Callable[..., SelfAttention] = Attention,
    dtype: jnp.dtype,
) -> SelfAttention:
    """Makes attention that norms each head of queries and keys.

    Args:
        norm: Makes a norm over the given number of features.
        attention: The class of the attention. It takes the arguments of `Attention`.
    """
    q_norm, k_norm = norm(config.head_dim), norm(config.head_dim)
    return attention(config, q_norm=q_norm, k_norm=k_norm, dtype=dtype)


def make_joint_normed_attention(
    config: AttentionConfig,
    *,
    norm: Callable[[int], nnx.Module],
    attention: Callable[..., SelfAttention] = Attention,
    dtype: jnp.dtype,
) -> SelfAttention:
    """Makes attention that norms all heads of queries together, and all heads of keys.

    Args:
        norm: Makes a norm over the given number of features, such as `JoinedHeadsRMSNorm`.
        attention: The class of the attention. It takes the arguments of `Attention`.
    """
    return attention(
        config,
        q_norm=norm(config.num_q_heads * config.head_dim),
        k_norm=norm(config.num_kv_heads * config.head_dim),
        dtype=dtype,
    )
