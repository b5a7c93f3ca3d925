"""North Micro (Cohere Compass), its language model: Command R's layers with ropes by layer type."""

import dataclasses
from collections.abc import Mapping

from models.config.attention_config import AttentionConfig
from models.config.dense_config import read_head_fields, read_layer_norm_fields
from models.config.fields import (
    read_flag,
    read_number,
    read_object,
    refuse_other_values,
    with_defaults,
)
from models.config.layer_types import attention_by_type, read_sliding_window
from models.config.rope_config import parse_rope_config
from models.families.cohere import CohereConfig, CohereForCausalLM
from models.layers.attention import Attention
from models.text_parts import without_mrope

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"bos_token_id": 5, "eos_token_id": 255_001}
_SUPPORTED = {"pooling": None}


class CohereCompassForCausalLM(CohereForCausalLM):
    """A layer type whose rope parameters are null has no positions.

    Source: huggingface.co/docs/transformers/model_doc/cohere_compass.
    """

    make_attention = staticmethod(Attention)

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> CohereConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        refuse_other_values(hf_config, _SUPPORTED)
        fields = read_layer_norm_fields(hf_config, default_tie_word_embeddings=True)
        max_positions = fields["max_position_embeddings"]
        has_bias = read_flag(hf_config, "attention_bias")
        base = AttentionConfig(
            **read_head_fields(hf_config),
            rope=parse_rope_config({"rope_parameters": {}}, max_positions),
            has_positions=False,
            qkv_bias=has_bias,
            out_bias=has_bias,
        )
        attention = attention_by_type(
            hf_config,
            [False] * fields["num_layers"],
            full=_with_rope(hf_config, base, "full_attention", max_positions),
            sliding=_with_rope(hf_config, base, "sliding_attention", max_positions),
            window=read_sliding_window(hf_config, default=4096),
            max_position_embeddings=max_positions,
        )
        return CohereConfig(
            **fields,
            attention=attention,
            logits_scale=read_number(hf_config, "logit_scale", 1.0),
            has_head_norms=False,
        )


def _with_rope(
    hf_config: Mapping[str, object],
    attention: AttentionConfig,
    layer_type: str,
    max_positions: int,
) -> AttentionConfig:
    ropes = read_object(hf_config, "rope_parameters")
    # Without an object for a layer type, all layers have the same parameters.
    is_by_type = {"full_attention", "sliding_attention"} & set(ropes)
    own = read_object(ropes, layer_type) if is_by_type else ropes
    if is_by_type and not own:
        return attention
    rope = parse_rope_config({**hf_config, "rope_parameters": without_mrope(own)}, max_positions)
    return dataclasses.replace(attention, rope=rope, has_positions=True)
