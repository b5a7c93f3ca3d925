"""EXAONE 4: norms after attention and after the MLP. If `config.json` sets a window, it has three
sliding-window layers to one full layer without positions.
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax.numpy as jnp

from models.config.attention_config import AttentionConfig
from models.config.dense_config import DenseConfig, read_attention, read_dense_fields
from models.config.fields import read_count, with_defaults
from models.config.layer_types import attention_by_type, read_sliding_window
from models.decoders.dense_decoder import DenseDecoder
from models.layers.dense_layers import make_head_normed_attention
from models.layers.residual_layers import PostNormLayer
from models.layers.rms_norm import RMSNorm

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 2}


class Exaone4ForCausalLM(DenseDecoder):
    """OLMo 2's layers with norms of each head of queries and keys.

    If some layers have a sliding window, the others have no positions.

    Source: arXiv:2507.11407.
    """

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> DenseConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        fields = read_dense_fields(hf_config)
        return DenseConfig(**fields, attention=read_exaone_attention(hf_config, fields))

    def __init__(self, config: DenseConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype)
        super().__init__(
            config,
            layer=PostNormLayer,
            attention=functools.partial(make_head_normed_attention, norm=norm, dtype=dtype),
            norm=norm,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )


def read_exaone_attention(
    hf_config: Mapping[str, object], fields: Mapping[str, object]
) -> tuple[AttentionConfig, ...]:
    """Reads the attention of each layer.

    Args:
        fields: The result of `read_dense_fields`.
    """
    sliding = read_attention(hf_config, fields, default_num_kv_heads=32)
    window = read_sliding_window(hf_config, default=4096)
    is_sliding = [False] * fields["num_layers"]
    if window is not None:
        is_sliding = read_sliding_pattern(hf_config, fields["num_layers"])
    return attention_by_type(
        hf_config,
        is_sliding,
        full=dataclasses.replace(sliding, has_positions=window is None),
        sliding=sliding,
        window=window,
        max_position_embeddings=fields["max_position_embeddings"],
    )


def read_sliding_pattern(hf_config: Mapping[str, object], num_layers: int) -> list[bool]:
    """For each layer, whether `sliding_window_pattern` gives it a window.

    The field is a number, 4 for three layers with a window and one without. The hub also has it
    as letters: "LLLG".
    """
    pattern = hf_config.get("sliding_window_pattern")
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        return [pattern[layer_idx % len(pattern)] == "L" for layer_idx in range(num_layers)]
    pattern = read_count(hf_config, "sliding_window_pattern", 4)
    return [(layer_idx + 1) % pattern != 0 for layer_idx in range(num_layers)]
