"""`MoEDecoder`: a decoder in which some layers have experts in place of the MLP."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx

from models.config.attention_config import AttentionConfig
from models.config.moe_config import MoEConfig
from models.decoders.decoder import Decoder
from models.decoders.layer_loop import Layer
from models.layers.attention import Attention
from models.layers.decoder_layers import PreNormLayer
from models.layers.mlp import MLP, GatedMLP
from models.layers.self_attention import SelfAttention


class MoEDecoder(Decoder):
    """Layers of attention and an MLP or experts. All norms are of one kind."""

    def __init__(
        self,
        config: MoEConfig,
        *,
        norm: Callable[[int], nnx.Module],
        embedding_scale: float = 1.0,
        has_head_kernel: bool,
        dtype: jnp.dtype,
        **parts: Callable[..., nnx.Module],
    ) -> None:
        """Makes the model with weights to be filled in.

        Args:
            norm: Makes a norm over the given number of features.
            embedding_scale: As in `Decoder.__init__`; so is `has_head_kernel`.
            parts: The other arguments of `make_moe_layers`.
        """
        super().__init__(
            config,
            layers=make_moe_layers(config, norm=norm, dtype=dtype, **parts),
            norm=norm(config.hidden_size),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
            embedding_scale=embedding_scale,
        )


def make_moe_layers(
    config: MoEConfig,
    *,
    layer: Callable[..., Layer] = PreNormLayer,
    attention: Callable[[AttentionConfig], SelfAttention] | None = None,
    mlp: Callable[..., MLP] = GatedMLP,
    sparse_mlp: Callable[[], MLP],
    norm: Callable[[int], nnx.Module],
    dtype: jnp.dtype,
) -> list[Layer]:
    """Makes a layer for each `AttentionConfig` of the config.

    Args:
        layer: The layer's class. It takes the arguments of `PreNormLayer`.
        attention: Makes the attention of one layer. None: `Attention` without norms.
        mlp: The class of the MLP in layers without experts. It takes the arguments of `GatedMLP`.
        sparse_mlp: Makes the experts of one layer, such as a `SparseMLP`.
        norm: Makes a norm over the given number of features.
    """
    if attention is None:
        attention = functools.partial(Attention, dtype=dtype)

    def make_mlp() -> MLP:
        return mlp(
            config.hidden_size,
            config.intermediate_size,
            activation=config.hidden_act,
            dtype=dtype,
        )

    return [
        layer(
            attention=attention(of_layer),
            mlp=sparse_mlp() if has_experts else make_mlp(),
            norm=functools.partial(norm, config.hidden_size),
        )
        for of_layer, has_experts in zip(config.attention, config.has_experts, strict=True)
    ]
