"""GLM-5: DeepSeek V3 with an index, which chooses the tokens to attend to, in some layers. Other
layers use the choice of the last index.
"""

from collections.abc import Mapping

import jax.numpy as jnp

from models.config.fields import with_defaults
from models.config.index_config import is_of_unused_index, read_has_index
from models.families.deepseek_v3 import DeepseekV3Config, DeepseekV3ForCausalLM
from models.families.deepseek_v32 import with_indexes
from models.forward.carry import Carry
from models.forward.layer_context import LayerContext
from models.layers.index_attention import (
    ChoiceCarry,
    ChoiceSharingLayer,
    IndexedLatentAttention,
)

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {
    "n_group": 1,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "rms_norm_eps": 1e-5,
    "rope_interleave": True,
    "topk_group": 1,
    "v_head_dim": 256,
}


class GlmMoeDsaForCausalLM(DeepseekV3ForCausalLM):
    """Source: huggingface.co/docs/transformers/model_doc/glm_moe_dsa."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> DeepseekV3Config:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        config = super().read_config(hf_config)
        return with_indexes(
            hf_config,
            config,
            has_index=read_has_index(hf_config, config.num_layers),
            default_num_heads=32,
            turns_neighbors=True,
        )

    def __init__(
        self, config: DeepseekV3Config, *, has_head_kernel: bool, dtype: jnp.dtype
    ) -> None:
        super().__init__(
            config,
            layer=ChoiceSharingLayer,
            make_attention=IndexedLatentAttention,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def ignores_weight(self, name: str) -> bool:
        return is_of_unused_index(name, self.config) or super().ignores_weight(name)

    def embed(self, context: LayerContext) -> Carry:
        index_top_k = self.config.attention[0].index_top_k
        return ChoiceCarry.before_layers(super().embed(context), index_top_k)
