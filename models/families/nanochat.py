"""nanochat: norms without parameters, backward rotation, squared ReLU, and a soft cap of logits."""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from models.config.dense_config import DenseConfig, read_attention, read_dense_fields
from models.config.fields import read_flag, read_optional_number, with_defaults
from models.decoders.dense_decoder import DenseDecoder
from models.forward.carry import Carry
from models.forward.kernel_settings import KernelSettings
from models.forward.layer_context import LayerContext
from models.layers.attention_variants import NormedLastAttention
from models.layers.dense_layers import make_head_normed_attention
from models.layers.mlp import PlainMLP
from models.layers.rms_norm import UnscaledRMSNorm
from models.layers.rotary import apply_rotary_backwards
from models.layers.soft_cap import soft_cap_logits
from models.weight_rule import WeightRule, with_renamed_sources

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"bos_token_id": 0, "eos_token_id": 1}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NanoChatConfig(DenseConfig):
    """The config of nanochat."""

    logits_soft_cap: float | None


class NanoChatForCausalLM(DenseDecoder):
    """The embeddings are normed too.

    Source: github.com/karpathy/nanochat.
    """

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> NanoChatConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        fields = read_dense_fields(hf_config, default_activation="relu2")
        attention = read_attention(
            hf_config, fields, has_bias=read_flag(hf_config, "attention_bias")
        )
        return NanoChatConfig(
            **fields,
            attention=(attention,) * fields["num_layers"],
            # A null is no cap.
            logits_soft_cap=read_optional_number(
                {"final_logit_softcapping": 15.0, **hf_config}, "final_logit_softcapping"
            ),
        )

    def __init__(self, config: NanoChatConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        def norm(num_features: int) -> UnscaledRMSNorm:
            return UnscaledRMSNorm(eps=config.rms_norm_eps)

        attention = functools.partial(
            make_head_normed_attention,
            norm=norm,
            attention=functools.partial(NormedLastAttention, rotate=apply_rotary_backwards),
            dtype=dtype,
        )
        super().__init__(
            config,
            attention=attention,
            mlp=PlainMLP,
            norm=norm,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """Checkpoints call the projections of the MLP fc1 and fc2."""
        return with_renamed_sources(super().weight_rules(), _stored_name)

    def embed(self, context: LayerContext) -> Carry:
        carry = super().embed(context)
        return dataclasses.replace(carry, hidden=self.norm(carry.hidden))

    def compute_logits(
        self,
        hidden: jax.Array,  # f[num_logits, hidden]
        kernels: KernelSettings,
    ) -> jax.Array:  # f32[num_logits, vocab]
        return soft_cap_logits(super().compute_logits(hidden, kernels), self.config.logits_soft_cap)


def _stored_name(name: str) -> str:
    return name.replace(".mlp.up_proj.", ".mlp.fc1.").replace(".mlp.down_proj.", ".mlp.fc2.")
