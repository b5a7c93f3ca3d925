"""Which layers read the keys and values of an earlier layer, from config.json."""

from collections.abc import Mapping, Sequence

from models.config.attention_config import AttentionConfig
from models.config.fields import read_count
from models.config.layer_types import LayerType
from models.errors import ModelConfigError

# Modules that a layer does not need if it reads the keys and values of another layer. Older
# checkpoints contain them nevertheless.
_UNUSED_IF_SHARED = ("k_proj", "v_proj", "k_norm", "v_norm")


def read_kv_owners(
    hf_config: Mapping[str, object],
    layer_types: Sequence[LayerType],
    *,
    default_num_shared: int,
) -> list[int | None]:
    """For each layer, the earlier layer whose keys and values it reads; None: it has its own.

    Each of the last `num_kv_shared_layers` layers reads the keys and values of the last layer of
    its type before them.

    Raises:
        ModelConfigError: There is no layer of the same type before the shared ones.
    """
    num_shared = read_count(hf_config, "num_kv_shared_layers", default_num_shared, minimum=0)
    first_shared = len(layer_types) - num_shared
    own, shared = layer_types[: max(first_shared, 0)], layer_types[max(first_shared, 0) :]
    missing = sorted(set(shared) - set(own))
    if missing or first_shared <= 0:
        raise ModelConfigError(
            f"config.json: num_kv_shared_layers={num_shared} of {len(layer_types)} leaves no "
            f"layer to share with ({', '.join(missing)}); expected one of each type before it."
        )
    last_of_type = {layer_type: layer_idx for layer_idx, layer_type in enumerate(own)}
    return [None] * first_shared + [last_of_type[layer_type] for layer_type in shared]


def is_of_shared_kv(name: str, attention: Sequence[AttentionConfig]) -> bool:
    """Whether a tensor makes keys or values for a layer that reads them from another layer.

    Args:
        attention: Of each layer.
    """
    return any(
        name == f"model.layers.{layer_idx}.self_attn.{module}.{parameter}"
        for layer_idx, layer in enumerate(attention)
        if layer.kv_layer_idx is not None
        for module in _UNUSED_IF_SHARED
        for parameter in ("weight", "bias")
    )
