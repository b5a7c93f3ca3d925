"""Sliding windows and layer types are read as transformers reads them."""

from typing import get_args

import pytest

from models.config.layer_types import LayerType
from models.errors import ModelConfigError, UnsupportedModelError
from models.registry import read_config

FULL, SLIDING = get_args(LayerType)
QWEN2, QWEN3 = "Qwen2ForCausalLM", "Qwen3ForCausalLM"
MISTRAL = "MistralForCausalLM"
GEMMA2, GEMMA3 = "Gemma2ForCausalLM", "Gemma3ForCausalLM"


def windows(architecture: str, num_layers: int, **fields: object) -> list[int | None]:
    """The window of each layer, in a model that reaches further than any."""
    config = read_config(
        {
            "architectures": [architecture],
            "vocab_size": 100,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 100_000,
        }
        | fields
    )
    return [layer.sliding_window for layer in config.attention]


def read(architecture: str, num_layers: int, **fields: object) -> str:
    """The layer types in short: "SSF" is two sliding layers and a full one."""
    return "".join("S" if w else "F" for w in windows(architecture, num_layers, **fields))


def test_every_layer_of_mistral_slides_if_there_is_a_window():
    assert read(MISTRAL, 3, sliding_window=16) == "SSS"
    assert read(MISTRAL, 3) == "SSS"
    assert read(MISTRAL, 3, sliding_window=None) == "FFF"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_window_layers": 1}, "FSSS"),
        ({"max_window_layers": 0}, "SSSS"),
        ({"max_window_layers": 4}, "FFFF"),
        ({}, "FFFF"),  # 28 where it is left out
        ({"max_window_layers": 1, "use_sliding_window": False}, "FFFF"),
        ({"max_window_layers": 1, "sliding_window": None}, "FFFF"),
        ({"max_window_layers": 1, "layer_types": [SLIDING, FULL, SLIDING, FULL]}, "SFSF"),
    ],
)
def test_layers_of_qwen_slide_from_max_window_layers_on(fields, expected):
    assert (
        read(QWEN2, 4, **({"use_sliding_window": True, "sliding_window": 8} | fields)) == expected
    )


def test_every_sixth_layer_of_gemma3_is_full():
    assert read(GEMMA3, 13) == "SSSSSFSSSSSFS"
    assert read(GEMMA3, 7, sliding_window_pattern=3) == "SSFSSFS"
    assert read(GEMMA3, 3, layer_types=[FULL, FULL, SLIDING]) == "FFS"


def test_every_second_layer_of_gemma2_is_full():
    assert read(GEMMA2, 5) == "SFSFS"
    # It is Gemma 3's field.
    assert read(GEMMA2, 5, sliding_window_pattern=3) == "SFSFS"


def test_layer_types_of_another_length_are_refused():
    with pytest.raises(ModelConfigError, match="list of 3 names"):
        read(GEMMA3, 3, layer_types=[FULL, SLIDING])


def test_other_kinds_of_attention_are_refused():
    with pytest.raises(UnsupportedModelError, match="'chunked_attention'"):
        read(GEMMA3, 2, layer_types=[FULL, "chunked_attention"])


@pytest.mark.parametrize("fields", [{"use_sliding_window": False}, {"use_sliding_window": True}])
def test_sliding_layers_without_a_window_are_refused(fields):
    with pytest.raises(ModelConfigError, match="no window is set"):
        read(QWEN2, 2, layer_types=[FULL, SLIDING], **({"sliding_window": None} | fields))


def test_mistral_with_layers_of_two_kinds_is_refused():
    assert read(MISTRAL, 2, sliding_window=8, layer_types=[SLIDING, SLIDING]) == "SS"
    with pytest.raises(UnsupportedModelError, match="remove layer_types"):
        read(MISTRAL, 2, sliding_window=8, layer_types=[FULL, SLIDING])


@pytest.mark.parametrize("fields", [{"sliding_window": 0}, {"sliding_window": "16"}])
def test_malformed_window_is_named(fields):
    with pytest.raises(ModelConfigError, match="sliding_window is"):
        read(MISTRAL, 2, **fields)


@pytest.mark.parametrize(
    ("architecture", "config_class", "fields"),
    [
        (GEMMA3, "Gemma3TextConfig", {}),
        (GEMMA3, "Gemma3TextConfig", {"sliding_window_pattern": 4}),
        (GEMMA3, "Gemma3TextConfig", {"layer_types": [FULL] * 3 + [SLIDING] * 10}),
        (GEMMA2, "Gemma2Config", {}),
        (GEMMA2, "Gemma2Config", {"sliding_window_pattern": 3}),
        (QWEN2, "Qwen2Config", {"use_sliding_window": True, "max_window_layers": 5}),
        (QWEN2, "Qwen2Config", {"use_sliding_window": True, "sliding_window": None}),
        (QWEN3, "Qwen3Config", {"use_sliding_window": True}),
        (QWEN3, "Qwen3Config", {"max_window_layers": 5}),
    ],
)
def test_layer_types_equal_live_transformers(architecture, config_class, fields):
    transformers = pytest.importorskip("transformers")
    theirs = getattr(transformers, config_class)(num_hidden_layers=13, **fields)
    wanted = [theirs.sliding_window if name == SLIDING else None for name in theirs.layer_types]
    assert windows(architecture, 13, **fields) == wanted
