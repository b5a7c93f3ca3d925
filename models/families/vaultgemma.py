"""VaultGemma: Gemma 2 without the norms after attention and after the MLP."""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from models.decoders.dense_decoder import DenseDecoder
from models.families.gemma2 import GemmaConfig, read_gemma2_config
from models.forward.kernel_settings import KernelSettings
from models.layers.rms_norm import OffsetRMSNorm
from models.layers.soft_cap import soft_cap_logits
from models.weight_rule import WeightRule, with_renamed_sources


class VaultGemmaForCausalLM(DenseDecoder):
    """Source: arXiv:2510.15001."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> GemmaConfig:
        return read_gemma2_config(hf_config)

    def __init__(self, config: GemmaConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(OffsetRMSNorm, eps=config.rms_norm_eps, dtype=dtype)
        super().__init__(
            config,
            norm=norm,
            embedding_scale=config.embedding_scale,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """See `Decoder.weight_rules`. Checkpoints have Gemma 2's name of the MLP's norm."""
        return with_renamed_sources(super().weight_rules(), _stored_name)

    def compute_logits(
        self,
        hidden: jax.Array,  # f[num_logits, hidden]
        kernels: KernelSettings,
    ) -> jax.Array:  # f32[num_logits, vocab]
        return soft_cap_logits(super().compute_logits(hidden, kernels), self.config.logits_soft_cap)


def _stored_name(name: str) -> str:
    return name.replace("post_attention_layernorm", "pre_feedforward_layernorm")
