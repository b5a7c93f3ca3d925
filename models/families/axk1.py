"""A.X K1: DeepSeek V3 with a norm after the experts of each layer."""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.config.fields import with_defaults
from models.config.moe_config import read_mlp_layer_types
from models.decoders.corrected_moe import CorrectedMoEConfig
from models.decoders.shared_moe import make_shared_experts
from models.families.deepseek_v3 import DeepseekV3Config, DeepseekV3ForCausalLM
from models.forward.layer_context import LayerContext
from models.layers.rms_norm import RMSNorm
from models.layers.routing import CorrectedRouter
from models.layers.sparse_mlp import SharedExpertsMLP, SparseMLP
from models.weight_rule import WeightRule, with_stored_names

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"bos_token_id": 163_691, "eos_token_id": 163_691, "first_k_dense_replace": 1}
_DEFAULT_NUM_EXPERTS = 192


class NormedExpertsMLP(SharedExpertsMLP):
    """`SharedExpertsMLP` with a norm of its output."""

    def __init__(self, *, norm: nnx.Module, **parts: nnx.Module) -> None:
        """Makes the block; the other arguments are as in `SharedExpertsMLP`."""
        super().__init__(**parts)
        self.post_mlp_layernorm = norm

    def __call__(
        self,
        x: jax.Array,  # f[num_rows, hidden], of the tokens of `context.of_rows`
        context: LayerContext,
    ) -> jax.Array:  # f[num_rows, hidden]
        return self.post_mlp_layernorm(super().__call__(x, context))


class AXK1ForCausalLM(DeepseekV3ForCausalLM):
    """Source: arXiv:2601.09200."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> DeepseekV3Config:
        num_experts = hf_config.get("num_local_experts") or _DEFAULT_NUM_EXPERTS
        given = with_defaults(hf_config, {**_DEFAULTS, "n_routed_experts": num_experts})
        # Checkpoints say by their tensors whether they have corrections (`weight_rules`).
        given.pop("topk_method", None)
        config = super().read_config(given)
        has_experts = read_mlp_layer_types(hf_config, config.has_experts)
        return dataclasses.replace(config, has_experts=has_experts)

    def __init__(
        self, config: DeepseekV3Config, *, has_head_kernel: bool, dtype: jnp.dtype
    ) -> None:
        super().__init__(
            config,
            make_experts=_make_normed_experts,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """See `Decoder.weight_rules`. The release has no corrections, which means zeros."""
        rules = super().weight_rules()
        for name, rule in rules.items():
            if name.endswith(".correction_bias"):
                rules[name] = _optional(rule)
        return with_stored_names(rules, {".mlp.post_mlp_layernorm.": ".post_mlp_layernorm."})

    def ignores_weight(self, name: str) -> bool:
        """See `Decoder.ignores_weight`. The release has norms for layers without experts too."""
        dense = (idx for idx, has_experts in enumerate(self.config.has_experts) if not has_experts)
        unused = tuple(f"model.layers.{idx}.post_mlp_layernorm." for idx in dense)
        return name.startswith(unused) or super().ignores_weight(name)


def _make_normed_experts(config: CorrectedMoEConfig, *, dtype: jnp.dtype) -> SparseMLP:
    return make_shared_experts(
        config,
        gate=CorrectedRouter(config.hidden_size, config.num_experts),
        choose=config.choose,
        mlp=functools.partial(
            NormedExpertsMLP,
            norm=RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype),
        ),
        dtype=dtype,
    )


def _optional(rule: WeightRule) -> WeightRule:
    """The same rule of a vector, which is zero if the checkpoint does not have it."""
    (source,) = rule.sources
    return dataclasses.replace(
        rule,
        sources=(dataclasses.replace(source, is_optional=True),),
        combine=lambda arrays: arrays[0] if arrays else np.zeros(source.shape, np.float32),
    )
