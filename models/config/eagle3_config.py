"""`Eagle3Config`: the config.json of an EAGLE-3 head, as SpecForge and speculators write it.

speculators keeps the layer's fields in an object, `transformer_layer_config`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from models.config.dense_config import DenseConfig, read_attention, read_dense_fields
from models.config.fields import read_count, read_flag, read_object
from models.config.model_config import ModelConfig
from models.errors import ModelConfigError, UnsupportedModelError

_LAYERS_FIELD = "eagle_aux_hidden_state_layer_ids"
# Fields of later versions of EAGLE that change what the head computes.
_UNSUPPORTED = ("norm_before_fc", "fc_norm", "parallel_drafting")


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config(DenseConfig):
    """One layer over hidden states of several layers of the target.

    Args:
        taps: Layers of the target whose hidden states the head reads, in rising order.
        target_hidden_size: Width of these hidden states.
        draft_vocab_size: Tokens that the head can propose. `vocab_size` is that of the target.
        norms_residual: The residual stream begins with the normed hidden state.
    """

    taps: tuple[int, ...]
    target_hidden_size: int
    draft_vocab_size: int
    norms_residual: bool


def read_eagle3_config(hf_config: Mapping[str, object], target: ModelConfig) -> Eagle3Config:
    """Reads the config.json of a head.

    Args:
        target: The config of the model that the head drafts for.

    Raises:
        ModelConfigError: A field is missing, of the wrong type, or does not fit the target.
        UnsupportedModelError: The head has several layers, or a field that is not supported.
    """
    hf_config = {**hf_config, **read_object(hf_config, "transformer_layer_config")}
    hf_config.setdefault("architectures", ["Eagle3"])
    for name in _UNSUPPORTED:
        if hf_config.get(name):
            raise UnsupportedModelError(
                f"config.json of the drafter: {name}={hf_config[name]!r} is not supported. Use an "
                "EAGLE-3 head without it."
            )
    fields = read_dense_fields(hf_config)
    if fields["num_layers"] != 1:
        raise UnsupportedModelError(
            f"config.json of the drafter: num_hidden_layers is {fields['num_layers']}; an EAGLE-3 "
            "head has 1."
        )
    if fields["vocab_size"] != target.vocab_size:
        raise ModelConfigError(
            f"config.json of the drafter: vocab_size is {fields['vocab_size']}; the model has "
            f"{target.vocab_size}. Use a head that was trained for this model."
        )
    has_bias = read_flag(hf_config, "attention_bias")
    return Eagle3Config(
        **fields | {"tie_word_embeddings": False},
        attention=(read_attention(hf_config, fields, has_bias=has_bias),),
        taps=_read_taps(hf_config, target.num_layers),
        target_hidden_size=target.hidden_size,
        draft_vocab_size=read_count(hf_config, "draft_vocab_size", fields["vocab_size"]),
        norms_residual=read_flag(hf_config, "norm_before_residual"),
    )


def _read_taps(hf_config: Mapping[str, object], num_layers: int) -> tuple[int, ...]:
    """Reads the layers whose input the head reads, and returns the layers before them.

    Example: 2 is the input of layer 2, which is the output of layer 1.
    """
    layer_ids = hf_config.get(_LAYERS_FIELD) or read_object(hf_config, "eagle_config").get(
        _LAYERS_FIELD
    )
    if layer_ids is None:
        layer_ids = [2, num_layers // 2, num_layers - 3]
    is_list = isinstance(layer_ids, list) and all(type(idx) is int for idx in layer_ids)
    if not is_list or layer_ids != sorted({idx for idx in layer_ids if 1 <= idx <= num_layers}):
        raise ModelConfigError(
            f"config.json of the drafter: {_LAYERS_FIELD} is {layer_ids!r}; expected different "
            f"numbers from 1 to {num_layers} in rising order. Without the field they are 2, L // 2 "
            f"and L - 3, where L is the model's number of layers, {num_layers}."
        )
    return tuple(idx - 1 for idx in layer_ids)
