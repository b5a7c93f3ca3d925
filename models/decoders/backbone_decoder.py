"""`BackboneDecoder`: a decoder whose layers have a recurrent mixer alone, such as Mamba."""

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from models.config.fields import read_flag
from models.config.model_config import ModelConfig
from models.decoders.decoder import Decoder
from models.forward.carry import Carry
from models.forward.layer_context import LayerContext
from models.layers.mixer_layer import MixerLayer
from models.layers.rms_norm import RMSNorm, RoundedInputRMSNorm
from models.layers.self_attention import SelfAttention
from models.weight_rule import WeightRule, with_renamed_sources


def read_residual_in_fp32(hf_config: Mapping[str, object]) -> bool:
    """Reads whether the residual stream is float32, whatever the dtype of the weights is."""
    return read_flag(hf_config, "residual_in_fp32", True)


class BackboneDecoder(Decoder):
    """Checkpoints name the part without the head `backbone`."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        mixer: Callable[[], SelfAttention],
        eps: float,
        residual_in_fp32: bool,
        has_head_kernel: bool,
        dtype: jnp.dtype,
    ) -> None:
        """Makes the model with weights to be filled in.

        Args:
            mixer: Makes the mixer of one layer.
            eps: Of the norms.
            residual_in_fp32: As `read_residual_in_fp32`. The mixers compute in `dtype`.
        """
        size = config.hidden_size
        norm = functools.partial(RoundedInputRMSNorm, size, eps=eps, dtype=dtype)
        super().__init__(
            config,
            layers=[MixerLayer(mixer=mixer(), norm=norm) for _ in range(config.num_layers)],
            norm=RMSNorm(size, eps=eps, dtype=dtype),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )
        self.residual_in_fp32 = residual_in_fp32

    def embed(self, context: LayerContext) -> Carry:
        hidden = super().embed(context).hidden
        return Carry(hidden=hidden.astype(jnp.float32) if self.residual_in_fp32 else hidden)

    def finish(self, carry: Carry) -> jax.Array:  # f[num_queries, hidden]
        return super().finish(carry).astype(self.norm.scale[...].dtype)

    def weight_rules(self) -> dict[str, WeightRule]:
        """Checkpoints have other names for the embedding and the last norm."""

        def rename(name: str) -> str:
            name = name.replace("model.embed_tokens.", "backbone.embeddings.")
            name = name.replace("model.norm.", "backbone.norm_f.")
            return name.replace("model.layers.", "backbone.layers.")

        return with_renamed_sources(super().weight_rules(), rename)

    def name_weight(self, name: str) -> str:
        """Some checkpoints on the hub have the embedding's name in the singular."""
        return name.replace("backbone.embedding.", "backbone.embeddings.")
