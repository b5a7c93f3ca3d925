"""`LatentAttentionConfig`: multi-head latent attention (MLA) of one layer, and how it is read."""

from collections.abc import Mapping
from dataclasses import dataclass

from models.cache.format import CacheFormat
from models.cache.latent_format import LatentFormat
from models.config.attention_config import AttentionConfig
from models.config.fields import read_count, read_flag, read_number, read_optional_number
from models.config.rope_config import RopeConfig, parse_rope_config
from models.errors import UnsupportedModelError
from models.layers.rotary import yarn_mscale


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionConfig(AttentionConfig):
    """Latent attention of one layer.

    A head has `nope_dim` dimensions of its own, then `rope_dim` dimensions whose keys all heads
    share; `head_dim` is their sum. `num_kv_heads` is that of the expanded form, one for each query
    head. The cache stores one vector per token.
    """

    # Width of the queries' latent; None: queries are projected from the hidden states.
    q_latent_dim: int | None
    latent_dim: int
    # Whether dimensions 2 * i and 2 * i + 1 are turned as a pair. Otherwise i and i + half are.
    turns_neighbors: bool = True
    norm_eps: float = 1e-6  # of the norms of latents
    unturned_dim: int = 0  # `rope_dim` of a layer without positions

    @property
    def rope_dim(self) -> int:
        """Dimensions with shared keys. They are turned if the layer has positions."""
        return self.rotary[1] if self.has_positions else self.unturned_dim

    @property
    def nope_dim(self) -> int:
        return self.head_dim - self.rope_dim

    def format(self, kv_dtype: str) -> CacheFormat:
        """What the layer's cache holds."""
        return LatentFormat.unpadded(
            latent_dim=self.latent_dim, rope_dim=self.rope_dim, dtype=kv_dtype
        )


def read_latent_attention(
    hf_config: Mapping[str, object],
    max_position_embeddings: int,
    *,
    default_q_latent_dim: int | None,
    turns_neighbors: bool = True,
) -> LatentAttentionConfig:
    """Reads the latent attention of DeepSeek and its followers, which all layers share.

    Args:
        default_q_latent_dim: Used if config.json has no `q_lora_rank`. If it has null, queries have
            no latent.

    Raises:
        UnsupportedModelError: `num_key_value_heads` is not the number of query heads.
        ModelConfigError: A field is missing or malformed.
    """
    num_heads = read_count(hf_config, "num_attention_heads")
    num_kv_heads = read_count(hf_config, "num_key_value_heads", num_heads)
    if num_kv_heads != num_heads:
        raise UnsupportedModelError(
            f"config.json: num_key_value_heads={num_kv_heads} with num_attention_heads={num_heads} "
            "is not supported for latent attention, in which each head has its own keys and "
            f"values; paxkv supports {num_heads}."
        )
    nope_dim = read_count(hf_config, "qk_nope_head_dim", 128)
    rope_dim = read_count(hf_config, "qk_rope_head_dim", 64)
    rope = parse_rope_config(hf_config, max_position_embeddings)
    has_bias = read_flag(hf_config, "attention_bias")
    return LatentAttentionConfig(
        hidden_size=read_count(hf_config, "hidden_size"),
        num_q_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=nope_dim + rope_dim,
        v_head_dim=read_count(hf_config, "v_head_dim", 128),
        rope=rope,
        rotary_dim=rope_dim,
        scale=(nope_dim + rope_dim) ** -0.5 * _scale_of_rope(hf_config, rope),
        qkv_bias=has_bias,
        out_bias=has_bias,
        q_latent_dim=_read_q_latent_dim(hf_config, default_q_latent_dim),
        latent_dim=read_count(hf_config, "kv_lora_rank", 512),
        turns_neighbors=turns_neighbors,
    )


def read_turns_neighbors(hf_config: Mapping[str, object]) -> bool:
    """Reads `rope_interleave`. A missing field is true; null is false, as in transformers."""
    return read_flag(hf_config, "rope_interleave", "rope_interleave" not in hf_config)


def _read_q_latent_dim(hf_config: Mapping[str, object], default: int | None) -> int | None:
    is_null = hf_config.get("q_lora_rank", default) is None
    return None if is_null else read_count(hf_config, "q_lora_rank", default)


def _scale_of_rope(hf_config: Mapping[str, object], rope: RopeConfig) -> float:
    """The factor of logits that `mscale_all_dim` asks for: 1 for the default embedding."""
    fields = hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {}
    weight = read_optional_number(fields, "mscale_all_dim")
    if rope.kind == "default" or weight is None:
        return 1.0
    factor = rope.factor if rope.kind == "yarn" else read_number(fields, "factor")
    return yarn_mscale(factor, weight) ** 2
