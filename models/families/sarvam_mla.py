"""Sarvam 105B: DeepSeek V3 with other defaults."""

from collections.abc import Mapping

from models.config.fields import with_defaults, with_main_names
from models.families.deepseek_v3 import DeepseekV3Config, DeepseekV3ForCausalLM

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {
    "first_k_dense_replace": 1,
    "initializer_range": 0.006,
    "n_group": 1,
    "n_routed_experts": 128,
    "num_mtp_layers": 0,
    "topk_group": 1,
}
# Other names of fields, of which the hub has the last two -> their names in transformers.
_MAIN_NAMES = {
    "num_local_experts": "n_routed_experts",
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
}


class SarvamMLAForCausalLM(DeepseekV3ForCausalLM):
    """Source: huggingface.co/docs/transformers/model_doc/sarvam_mla."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> DeepseekV3Config:
        given = with_main_names(hf_config, _MAIN_NAMES)
        given.setdefault("q_lora_rank", None)
        if isinstance(given.get("rope_scaling"), Mapping):
            given["rope_scaling"] = _with_known_kind(given["rope_scaling"])
        return super().read_config(with_defaults(given, _DEFAULTS))


def _with_known_kind(rope_scaling: Mapping[str, object]) -> dict[str, object]:
    """The hub calls YaRN "deepseek_yarn"."""
    return {
        name: "yarn" if value == "deepseek_yarn" else value for name, value in rope_scaling.items()
    }
