"""Reads `per_layer_config`: fields of single layers that replace the common ones."""

from collections.abc import Collection, Mapping

from models.errors import ModelConfigError, UnsupportedModelError

_FIELD = "per_layer_config"


def read_layer_overrides(
    hf_config: Mapping[str, object], num_layers: int, *, supported: Collection[str]
) -> dict[int, Mapping[str, object]] | None:
    """Reads the fields of single layers.

    transformers pads the layers' numbers with zeros to one length: layer 5 of 30 is "05".

    Args:
        supported: Names of fields that a layer may have.

    Returns:
        Layer number -> the layer's fields. None if there is no `per_layer_config`, which
        transformers writes since version 5.24.

    Raises:
        ModelConfigError: `per_layer_config` is not an object of layers.
        UnsupportedModelError: A layer has another field.
    """
    by_layer = hf_config.get(_FIELD)
    if by_layer is None:
        return None
    if not isinstance(by_layer, Mapping):
        raise ModelConfigError(
            f"config.json: {_FIELD} is {by_layer!r}; expected an object of layers."
        )
    numbers = {name: _read_layer_idx(name) for name in by_layer}
    unknown = sorted(str(name) for name, idx in numbers.items() if idx not in range(num_layers))
    if unknown:
        raise ModelConfigError(
            f"config.json: {_FIELD} has the layers {', '.join(unknown)}; expected numbers "
            f"from 0 to {num_layers - 1}."
        )
    if len(set(numbers.values())) < len(numbers):
        raise ModelConfigError(
            f"config.json: {_FIELD} has the layers {', '.join(map(str, numbers))}; "
            "expected every layer at most once."
        )
    for layer_idx, written in by_layer.items():
        if not isinstance(written, Mapping | None):
            raise ModelConfigError(
                f"config.json: {_FIELD} of layer {layer_idx} is {written!r}; expected an object."
            )
        other = sorted((written or {}).keys() - set(supported))
        if other:
            raise UnsupportedModelError(
                f"config.json: {_FIELD} of layer {layer_idx} has {', '.join(other)}; "
                f"paxkv supports {', '.join(supported)}."
            )
    return {numbers[name]: written or {} for name, written in by_layer.items()}


def without_layer_overrides(hf_config: Mapping[str, object]) -> dict[str, object]:
    """The config.json for `read_model_fields`, which refuses the field if it is not read."""
    return {name: value for name, value in hf_config.items() if name != _FIELD}


def _read_layer_idx(name: object) -> int | None:
    """The layer's number in a name of `per_layer_config`; None if the name is not a number."""
    text = str(name)
    return int(text) if text.isascii() and text.isdecimal() else None
