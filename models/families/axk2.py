"""A.X K2: DeepSeek V3.2 with gates of attention and of norms."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.config.fields import read_count, with_defaults
from models.config.index_config import is_of_unused_index
from models.families.deepseek_v3 import DeepseekV3Config, DeepseekV3ForCausalLM
from models.families.deepseek_v32 import with_indexes
from models.layers.decoder_layers import PreNormLayer
from models.layers.gated_latent_attention import GatedIndexedLatentAttention
from models.layers.gated_norm import GatedRMSNorm
from models.layers.mlp import MLP
from models.layers.routing import SigmoidTopK
from models.layers.self_attention import SelfAttention
from models.layers.sparse_mlp import SparseMLP
from models.weight_rule import Source, WeightRule, with_stored_names

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {
    "bos_token_id": 163_691,
    "eos_token_id": 163_691,
    "first_k_dense_replace": 1,
    "gated_norm_rank": 16,
    "kv_lora_rank": 128,
    "moe_intermediate_size": 512,
    "n_group": 1,
    "q_lora_rank": 384,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "rope_interleave": True,
    "topk_group": 1,
    "v_head_dim": 64,
}
_DEFAULT_NUM_EXPERTS = 128
_STORED_NAMES = {"layernorm.fc1.": "layernorm.W_down.", "layernorm.fc2.": "layernorm.W_up."}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AXK2Config(DeepseekV3Config):
    """The config of A.X K2."""

    gated_norm_rank: int


@dataclasses.dataclass(frozen=True, slots=True)
class ZeroedGroupsTopK(SigmoidTopK):
    """`SigmoidTopK` that ranks experts of dropped groups as 0, and not as minus infinity.

    Such an expert is chosen before experts of kept groups whose sum of sigmoid and correction is
    negative.
    """

    def _in_kept_groups(self, ranked: jax.Array) -> jax.Array:
        kept = SigmoidTopK._in_kept_groups(self, ranked)
        return jnp.where(jnp.isneginf(kept), 0.0, kept)


class AXK2Layer(PreNormLayer):
    """A layer with gated norms. The norm before an MLP without experts has no gate."""

    def __init__(
        self,
        *,
        attention: SelfAttention,
        mlp: MLP,
        norm: Callable[[], nnx.Module],
        gated_norm: Callable[[], nnx.Module],
    ) -> None:
        super().__init__(attention=attention, mlp=mlp, norm=gated_norm)
        if not isinstance(mlp, SparseMLP):
            self.post_attention_layernorm = norm()


class AXK2ForCausalLM(DeepseekV3ForCausalLM):
    """Source: huggingface.co/docs/transformers/model_doc/axk2."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> AXK2Config:
        num_experts = hf_config.get("num_local_experts") or _DEFAULT_NUM_EXPERTS
        given = with_defaults(hf_config, {**_DEFAULTS, "n_routed_experts": num_experts})
        config = with_indexes(
            given,
            super().read_config(given),
            has_index=[True] * read_count(given, "num_hidden_layers"),
            default_num_heads=16,
            turns_neighbors=False,
        )
        own = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        choice = dataclasses.asdict(config.choose)
        own["choose"] = ZeroedGroupsTopK(**choice)
        return AXK2Config(**own, gated_norm_rank=read_count(given, "gated_norm_rank"))

    def __init__(self, config: AXK2Config, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        gated_norm = functools.partial(
            GatedRMSNorm,
            config.hidden_size,
            rank=config.gated_norm_rank,
            eps=config.rms_norm_eps,
            dtype=dtype,
        )
        super().__init__(
            config,
            layer=functools.partial(AXK2Layer, gated_norm=gated_norm),
            make_attention=GatedIndexedLatentAttention,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """Each head's queries, and then its gates, are rows of one matrix."""
        rules = super().weight_rules()
        for layer_idx, attention in enumerate(self.config.attention):
            prefix = f"layers.{layer_idx}.self_attn."
            num_rows = attention.num_q_heads * (attention.head_dim + attention.value_head_dim)
            packed = Source(
                name=f"model.{prefix}q_b_proj.weight",
                shape=(num_rows, 2 * attention.q_latent_dim),
            )
            parts = {
                "q_b_proj": slice(attention.head_dim),
                "gate_proj": slice(attention.head_dim, None),
            }
            for name, part in parts.items():
                take = functools.partial(_take_rows, part=part, num_heads=attention.num_q_heads)
                rule = rules[f"{prefix}{name}.kernel"]
                rules[f"{prefix}{name}.kernel"] = dataclasses.replace(
                    rule, sources=(packed,), combine=take
                )
        return with_stored_names(rules, _STORED_NAMES)

    def ignores_weight(self, name: str) -> bool:
        return is_of_unused_index(name, self.config) or super().ignores_weight(name)


def _take_rows(weights_np: Sequence[np.ndarray], *, part: slice, num_heads: int) -> np.ndarray:
    (weight_np,) = weights_np
    by_head = weight_np.reshape(num_heads, -1, weight_np.shape[1])
    return by_head[:, part].reshape(-1, weight_np.shape[1])
