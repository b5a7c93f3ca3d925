"""Sarvam 105B: DeepSeek V3 with other defaults."""

from collections.abc import Mapping

from models.config.fields import with_defaults
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
# Names of fields on the hub -> names in transformers.
_HUB_NAMES = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}


class SarvamMLAForCausalLM(DeepseekV3ForCausalLM):
    """Source: huggingface.co/docs/transformers/model_doc/sarvam_mla."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> DeepseekV3Config:
        given = dict(hf_config)
        for hub_name, name in _HUB_NAMES.items():
            if given.get(hub_name) is not None:
                given.setdefault(name, given[hub_name])
        given.setdefault("q_lora_rank", None)
        if isinstance(given.get("rope_scaling"), Mapping):
            given["rope_scaling"] = _with_known_kind(given["rope_scaling"])
        return super().read_config(with_defaults(given, _DEFAULTS))


def _with_known_kind(rope_scaling: Mapping[str, object]) -> dict[str, object]:
    """The hub calls YaRN "deepseek_yarn"."""
    return {
        name: "yarn" if value == "deepseek_yarn" else value for name, value in rope_scaling.items()
    }
