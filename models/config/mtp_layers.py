"""Layers for multi-token prediction, which checkpoints may have after the model's own layers."""

from collections.abc import Mapping

from models.config.fields import read_count

# The names on the hub and in transformers 5.
_NAMES = ("num_nextn_predict_layers", "num_mtp_layers")


def read_num_mtp_layers(hf_config: Mapping[str, object], *, default: int) -> int:
    """How many layers of a checkpoint follow the model's own layers."""
    given = [name for name in _NAMES if hf_config.get(name) is not None]
    return read_count(hf_config, given[0] if given else _NAMES[0], default, minimum=0)


def is_of_mtp_layer(name: str, *, num_layers: int, num_mtp_layers: int) -> bool:
    """Whether a tensor of a checkpoint, "model.layers.61.enorm.weight", is of such a layer."""
    prefixes = (f"model.layers.{num_layers + idx}." for idx in range(num_mtp_layers))
    return name.startswith(tuple(prefixes))
