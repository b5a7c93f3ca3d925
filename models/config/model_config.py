"""`ModelConfig`: what the engine needs to know about a model, read from its config.json."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from models.config.attention_config import AttentionConfig
from models.config.fields import (
    read_count,
    read_flag,
    read_optional_number,
    read_token_ids,
)
from models.config.rope_config import max_scaled_positions
from models.decoder_spec import DecoderSpec, spec_of_attention
from models.errors import UnsupportedModelError

ModelDtype = Literal["float32", "bfloat16", "float16"]

MODEL_DTYPES: tuple[ModelDtype, ...] = ("float32", "bfloat16", "float16")
# Names of torch's dtypes -> dtype to load such weights as.
_DTYPES: dict[str, ModelDtype] = {
    **{dtype: dtype for dtype in MODEL_DTYPES},
    "float": "float32",
    "half": "float16",
    "float64": "float32",
    "double": "float32",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One decoder-only model, after every default and old spelling has been resolved.

    Families derive a class with what their own layers need (`models/families/`).
    """

    architecture: str  # "LlamaForCausalLM"
    model_type: str  # "llama"
    vocab_size: int
    hidden_size: int
    num_layers: int
    attention: tuple[AttentionConfig | None, ...]  # of each layer; None: the layer has none
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: ModelDtype | None  # as config.json has it, not as it is loaded; None: it has none
    initializer_range: float
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    # Sliding layers keep all their keys and values, as full layers do. Layers whose KV heads have
    # equal sizes then share one block table.
    # A choice of the engine, not of the checkpoint.
    has_unified_kv: bool = False
    # The checkpoint also has a vision or an audio part, which is not loaded.
    has_other_parts: bool = False

    @property
    def attention_layers(self) -> tuple[AttentionConfig, ...]:
        """The attention configs of the layers that have attention."""
        return tuple(layer for layer in self.attention if layer is not None)

    @property
    def max_scaled_positions(self) -> int:
        """The largest number of positions that the model supports with its scaled rotary embedding.

        The least scaled layer decides: for Gemma 3, it is the number in config.json.
        """
        ropes = {layer.rope for layer in self.attention_layers}
        limits = [max_scaled_positions(rope, self.max_position_embeddings) for rope in ropes]
        return min(limits, default=self.max_position_embeddings)

    def for_length(self, max_model_len: int | None) -> "ModelConfig":
        """The config of an engine whose requests have at most `max_model_len` tokens.

        Args:
            max_model_len: None is `max_scaled_positions`.
        """
        length = self.max_scaled_positions if max_model_len is None else max_model_len
        attention = tuple(layer and layer.for_length(length) for layer in self.attention)
        return replace(self, attention=attention)

    def spec(self, kv_dtype: str) -> DecoderSpec:
        """What the layers keep in the KV cache; a family with other caches overrides it.

        Args:
            kv_dtype: The dtype of keys and values.
        """
        return spec_of_attention(
            self.attention, kv_dtype=kv_dtype, has_unified_kv=self.has_unified_kv
        )


def read_model_fields(
    hf_config: Mapping[str, object], *, default_tie_word_embeddings: bool = False
) -> dict[str, object]:
    """The fields of `ModelConfig` except `attention`, which are the same for all families.

    Raises:
        ModelConfigError: A field is missing, or of the wrong type.
        UnsupportedModelError: The model needs a feature that paxkv does not have.
    """
    _refuse_bidirectional(hf_config)
    _refuse_layer_overrides(hf_config)
    bos_token_ids = read_token_ids(hf_config, "bos_token_id")
    return {
        "architecture": hf_config["architectures"][0],
        "model_type": str(hf_config.get("model_type", "")),
        "vocab_size": read_count(hf_config, "vocab_size"),
        "hidden_size": read_count(hf_config, "hidden_size"),
        "num_layers": read_count(hf_config, "num_hidden_layers"),
        "max_position_embeddings": read_count(hf_config, "max_position_embeddings"),
        "tie_word_embeddings": read_flag(
            hf_config, "tie_word_embeddings", default_tie_word_embeddings
        ),
        "dtype": _read_dtype(hf_config),
        "initializer_range": _read_initializer_range(hf_config),
        "bos_token_id": bos_token_ids[0] if bos_token_ids else None,
        "eos_token_ids": read_token_ids(hf_config, "eos_token_id"),
    }


def _read_dtype(hf_config: Mapping[str, object]) -> ModelDtype | None:
    """Reads `dtype` (transformers 5) or `torch_dtype`, such as "bfloat16" or "torch.half"."""
    name = hf_config.get("dtype") or hf_config.get("torch_dtype")
    if name is None or name == "auto":
        return None
    dtype = _DTYPES.get(name.removeprefix("torch.")) if isinstance(name, str) else None
    if dtype is None:
        raise UnsupportedModelError(
            f"config.json: dtype {name!r} is not supported; paxkv supports {', '.join(_DTYPES)}."
        )
    return dtype


def _read_initializer_range(hf_config: Mapping[str, object]) -> float:
    # Some checkpoints have 0. Only random weights depend on it.
    return read_optional_number(hf_config, "initializer_range") or 0.02


def _refuse_bidirectional(hf_config: Mapping[str, object]) -> None:
    if hf_config.get("use_bidirectional_attention"):
        raise UnsupportedModelError(
            "config.json: use_bidirectional_attention is set, so tokens attend to later tokens, "
            "which is not supported. Such a model computes embeddings and generates no text."
        )


def _refuse_layer_overrides(hf_config: Mapping[str, object]) -> None:
    if hf_config.get("per_layer_config"):
        raise UnsupportedModelError(
            "config.json: per_layer_config is set, so single layers have other fields than the "
            f"rest, which is not supported for {hf_config['architectures'][0]}."
        )
