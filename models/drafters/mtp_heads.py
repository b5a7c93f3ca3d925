"""Finds the class of a model's head for multi-token prediction."""

from models.config.model_config import ModelConfig
from models.drafters.mimo_mtp_head import MiMoMTPHead
from models.drafters.mtp_head import MTPHead
from models.drafters.qwen_mtp_head import QwenMTPHead
from models.errors import UnsupportedModelError

_HEADS: dict[str, type[MTPHead]] = {
    "DeepseekV3ForCausalLM": MTPHead,
    "Glm4MoeForCausalLM": MTPHead,
    "MiMoForCausalLM": MiMoMTPHead,
    "Qwen3NextForCausalLM": QwenMTPHead,
    "Qwen3_5ForCausalLM": QwenMTPHead,
    "Qwen3_5MoeForCausalLM": QwenMTPHead,
}


def find_mtp_head(config: ModelConfig) -> type[MTPHead]:
    """Returns the class of the head of a model.

    Raises:
        UnsupportedModelError: The model has no such head, or one of a form that is not supported.
    """
    head_class = _HEADS.get(config.architecture)
    if head_class is None:
        raise UnsupportedModelError(
            f"method 'mtp' does not support {config.architecture}; it supports "
            f"{', '.join(_HEADS)}. Use another method."
        )
    return head_class
