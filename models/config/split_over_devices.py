"""Which models can be split over the devices of a mesh."""

from models.config.model_config import ModelConfig
from models.errors import ModelError


def check_split(config: ModelConfig, num_devices: int) -> None:
    """Checks that devices get equal numbers of heads. `WeightRule.on_mesh` checks other widths.

    Raises:
        ModelError: The heads of a layer cannot be split evenly.
    """
    if num_devices == 1:
        return
    where = f"{config.architecture} cannot be split over {num_devices} devices"
    for layer in dict.fromkeys(config.attention_layers):
        num_q_heads, num_kv_heads = layer.num_q_heads, layer.num_kv_heads
        if num_q_heads % num_devices:
            raise ModelError(
                f"{where}: a layer has {num_q_heads} query heads; expected a multiple of the "
                "number of devices. Use fewer devices."
            )
        if num_kv_heads % num_devices and num_devices % num_kv_heads:
            raise ModelError(
                f"{where}: a layer has {num_kv_heads} KV heads; expected a multiple or a divisor "
                "of the number of devices. Use fewer devices."
            )


def splits_kv_heads(config: ModelConfig, num_devices: int) -> bool:
    """Whether no two devices have keys and values of the same head."""
    return all(layer.num_kv_heads % num_devices == 0 for layer in config.attention_layers)
