"""`DenseDecoder`: a decoder whose layers are made by `make_dense_layers`."""

from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx

from models.config.attention_config import AttentionConfig
from models.config.dense_config import DenseConfig, LayerNormConfig
from models.decoders.decoder import Decoder
from models.decoders.layer_loop import Layer
from models.layers.decoder_layers import PreNormLayer
from models.layers.dense_layers import make_dense_layers
from models.layers.mlp import MLP, GatedMLP
from models.layers.self_attention import SelfAttention


class DenseDecoder(Decoder):
    """Layers of attention and an MLP; the last norm is of the same kind as the layers' norms."""

    def __init__(
        self,
        config: DenseConfig | LayerNormConfig,
        *,
        layer: Callable[..., Layer] = PreNormLayer,
        attention: Callable[[AttentionConfig], SelfAttention] | None = None,
        mlp: Callable[..., MLP] = GatedMLP,
        mlp_bias: bool = False,
        norm: Callable[[int], nnx.Module],
        embedding_scale: float = 1.0,
        has_head_kernel: bool,
        dtype: jnp.dtype,
    ) -> None:
        """Makes the model with weights to be filled in.

        Args:
            layer: As in `make_dense_layers`; so are `attention`, `mlp`, `mlp_bias` and `norm`.
            embedding_scale: As in `Decoder.__init__`; so is `has_head_kernel`.
        """
        layers = make_dense_layers(
            config,
            layer=layer,
            attention=attention,
            mlp=mlp,
            mlp_bias=mlp_bias,
            norm=norm,
            dtype=dtype,
        )
        super().__init__(
            config,
            layers=layers,
            norm=norm(config.hidden_size),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
            embedding_scale=embedding_scale,
        )
