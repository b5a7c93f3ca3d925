"""`OutputNormLayer`: a layer whose norms of outputs are unlike its norms of inputs."""

from collections.abc import Callable

from flax import nnx

from models.layers.decoder_layers import SandwichNormLayer
from models.layers.mlp import MLP
from models.layers.self_attention import SelfAttention


class OutputNormLayer(SandwichNormLayer):
    """`SandwichNormLayer` with other norms of the outputs of attention and of the MLP (Muse)."""

    def __init__(
        self,
        *,
        attention: SelfAttention,
        mlp: MLP,
        norm: Callable[[], nnx.Module],
        attention_out_norm: Callable[[], nnx.Module],
        mlp_out_norm: Callable[[], nnx.Module],
    ) -> None:
        """Makes the layer.

        Args:
            norm: Makes a norm of the input of attention or of the MLP.
            attention_out_norm: Makes the norm of attention's output.
            mlp_out_norm: Makes the norm of the MLP's output.
        """
        super().__init__(attention=attention, mlp=mlp, norm=norm)
        self.post_attention_layernorm = attention_out_norm()
        self.post_feedforward_layernorm = mlp_out_norm()
