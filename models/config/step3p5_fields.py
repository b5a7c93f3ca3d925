"""Fields of Step 3.5's config.json, as the hub and as transformers 5 write them."""

from collections.abc import Mapping

from models.config.fields import read_count, read_layer_numbers, read_optional_number
from models.config.moe_config import read_mlp_layer_types
from models.config.mtp_layers import read_num_mtp_layers
from models.errors import ModelConfigError

# Name on the hub -> name in transformers 5. If a config.json has both, the hub's counts.
_NEW_NAMES = {
    "moe_num_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "num_attention_groups": "num_key_value_heads",
    "share_expert_dims": "share_expert_dim",
}
# On the hub, these lists go on with the layers for multi-token prediction.
_LISTS = (
    "layer_types",
    "mlp_layer_types",
    "partial_rotary_factors",
    "rope_theta",
    "swiglu_limits",
    "swiglu_limits_shared",
)


def with_new_names(hf_config: Mapping[str, object]) -> dict[str, object]:
    """The config.json with the names of transformers 5, and lists of the model's own layers."""
    given = {new: hf_config.get(old) for old, new in _NEW_NAMES.items()}
    given = {name: value for name, value in given.items() if value is not None}
    num_layers = read_count(hf_config, "num_hidden_layers")
    num_written = num_layers + read_num_mtp_layers(hf_config, default=0)
    for name in _LISTS:
        values = hf_config.get(name)
        if isinstance(values, list) and len(values) == num_written:
            given[name] = values[:num_layers]
    return {**hf_config, **given}


def bad_list(name: str, found: object, num_layers: int) -> ModelConfigError:
    """The error of a field that should be a list with a number for each layer."""
    return ModelConfigError(
        f"config.json: {name} is {found!r}; expected a list of {num_layers} numbers, one for each "
        "layer."
    )


def read_limits(
    hf_config: Mapping[str, object], name: str, num_layers: int
) -> tuple[float | None, ...]:
    """Reads a number for each layer; None where it is null or 0, or where the field is missing."""
    values = hf_config.get(name) or [None] * num_layers
    if not isinstance(values, list) or len(values) != num_layers:
        raise bad_list(name, values, num_layers)
    return tuple(read_optional_number({name: value}, name) for value in values)


def read_has_experts(hf_config: Mapping[str, object], num_layers: int) -> tuple[bool, ...]:
    """For each layer, whether it has experts: by default all but the first three do.

    `mlp_layer_types` wins over `moe_layers_enum`, the numbers of layers with experts: "3,4,5".
    """
    name = "moe_layers_enum"
    written = hf_config.get(name)
    if isinstance(written, str):
        parts = [part.strip() for part in written.split(",") if part.strip()]
        written = [int(part) if part.isdecimal() else part for part in parts]
    numbers = read_layer_numbers({name: written}, name)
    if numbers is None:
        numbers = range(3, num_layers)
    return read_mlp_layer_types(
        hf_config, [layer_idx in numbers for layer_idx in range(num_layers)]
    )
