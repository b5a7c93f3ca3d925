"""`BiasedHeadDecoder`: a decoder whose vocabulary head has a bias."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from models.config.model_config import ModelConfig
from models.decoders.decoder import Decoder
from models.decoders.layer_loop import Layer
from models.forward.kernel_settings import KernelSettings
from models.layers.linear import Linear


class BiasedHeadDecoder(Decoder):
    """`Decoder` with a bias for each token's logit.

    The head cannot be the embedding, so `read_config` has to refuse `tie_word_embeddings`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        layers: Sequence[Layer],
        norm: nnx.Module,
        dtype: jnp.dtype,
    ) -> None:
        """See `Decoder.__init__`."""
        super().__init__(config, layers=layers, norm=norm, has_head_kernel=True, dtype=dtype)
        self.lm_head = Linear(
            config.hidden_size,
            config.vocab_size,
            axes=(None, "vocab"),
            use_bias=True,
            dtype=dtype,
        )

    def compute_logits(
        self,
        hidden: jax.Array,  # f[num_logits, hidden]
        kernels: KernelSettings,
    ) -> jax.Array:  # f32[num_logits, vocab]
        return super().compute_logits(hidden, kernels) + self.lm_head.bias[...].astype(jnp.float32)
