"""Phi-3, Phi-3.5-mini, Phi-4 and Phi-4-mini: Llama's layers with packed weights, and the rotary
embedding longrope. If `config.json` says so, all layers have a sliding window, and rotary
embeddings are partial.
"""

from collections.abc import Mapping

from models.config.attention_config import AttentionConfig
from models.config.dense_config import read_dense_fields, read_head_fields
from models.config.fields import with_defaults
from models.config.partial_rotary import parse_partial_rope
from models.families.llama import LlamaConfig, LlamaForCausalLM
from models.families.mistral import equally_windowed_layers
from models.layers.packed_weights import with_packed_gate_up, with_packed_qkv
from models.weight_rule import WeightRule

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 32_000,
    "original_max_position_embeddings": 4096,
}


class Phi3ForCausalLM(LlamaForCausalLM):
    """Source: arXiv:2404.14219."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> LlamaConfig:
        hf_config = _with_longrope(with_defaults(hf_config, _DEFAULTS))
        fields = read_dense_fields(hf_config)
        head_fields = read_head_fields(hf_config)
        max_positions = fields["max_position_embeddings"]
        rope, factor = parse_partial_rope(hf_config, max_positions, default_factor=1.0)
        attention = AttentionConfig(
            **head_fields, rope=rope, rotary_dim=int(head_fields["head_dim"] * factor)
        )
        layers = equally_windowed_layers(hf_config, attention, fields, default_window=None)
        return LlamaConfig(**fields, attention=layers, mlp_bias=False)

    def weight_rules(self) -> dict[str, WeightRule]:
        """See `Decoder.weight_rules`. Checkpoints pack q, k and v, and the gate and up."""
        rules = with_packed_qkv(super().weight_rules(), self.config.attention)
        return with_packed_gate_up(
            rules,
            num_layers=self.config.num_layers,
            intermediate_size=self.config.intermediate_size,
        )


def _with_longrope(hf_config: dict[str, object]) -> dict[str, object]:
    """The config.json with longrope under its own name. The first releases call it su or yarn."""
    changed = dict(hf_config)
    for name in ("rope_scaling", "rope_parameters"):
        fields = hf_config.get(name)
        if not isinstance(fields, Mapping):
            continue
        if (fields.get("rope_type") or fields.get("type")) in ("su", "yarn"):
            changed[name] = {**fields, "rope_type": "longrope"}
    return changed
