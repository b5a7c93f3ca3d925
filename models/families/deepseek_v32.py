"""DeepSeek V3.2: DeepSeek V3 with an index in each layer, which chooses the tokens to attend to."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax.numpy as jnp

from models.config.fields import read_count, with_defaults
from models.config.index_config import (
    is_of_unused_index,
    read_has_index,
    read_index,
    refuse_other_layer_types,
    with_index,
)
from models.config.moe_config import read_mlp_layer_types
from models.errors import UnsupportedModelError
from models.families.deepseek_v3 import DeepseekV3Config, DeepseekV3ForCausalLM
from models.layers.index_attention import IndexedLatentAttention

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"rope_interleave": True}


class DeepseekV32ForCausalLM(DeepseekV3ForCausalLM):
    """Source: arXiv:2512.02556."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> DeepseekV3Config:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        config = super().read_config(hf_config)
        has_index = read_has_index(hf_config, config.num_layers)
        if not all(has_index):
            raise UnsupportedModelError(
                "config.json: an index in some layers only (indexer_types, index_topk_pattern or "
                "index_topk_freq) is not supported for DeepseekV32ForCausalLM; paxkv supports an "
                "index in each layer."
            )
        return with_indexes(
            hf_config, config, has_index=has_index, default_num_heads=64, turns_neighbors=False
        )

    def __init__(
        self, config: DeepseekV3Config, *, has_head_kernel: bool, dtype: jnp.dtype
    ) -> None:
        super().__init__(
            config,
            make_attention=IndexedLatentAttention,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def ignores_weight(self, name: str) -> bool:
        return is_of_unused_index(name, self.config) or super().ignores_weight(name)


def with_indexes(
    hf_config: Mapping[str, object],
    config: DeepseekV3Config,
    *,
    has_index: Sequence[bool],
    default_num_heads: int,
    turns_neighbors: bool,
) -> DeepseekV3Config:
    """The same config with index attention, and with experts where config.json has them.

    Args:
        has_index: For each layer, whether it has an index. Others use the choice of the last one.

    Raises:
        UnsupportedModelError: The attention's queries have no latent, which is the index's input,
            or a layer has no index attention.
    """
    refuse_other_layer_types(hf_config, config.num_layers)
    index = read_index(
        hf_config, default_num_heads=default_num_heads, turns_neighbors=turns_neighbors
    )
    top_k = read_count(hf_config, "index_topk", 2048)
    if any(layer.q_latent_dim is None for layer in config.attention):
        raise UnsupportedModelError(
            f"config.json: q_lora_rank=null is not supported for {config.architecture}, in which "
            "the index reads the queries' latent; paxkv supports a positive integer."
        )
    attention = tuple(
        with_index(layer, index_top_k=top_k, index=index if has_own else None)
        for layer, has_own in zip(config.attention, has_index, strict=True)
    )
    has_experts = read_mlp_layer_types(hf_config, config.has_experts)
    return dataclasses.replace(config, attention=attention, has_experts=has_experts)
