"""Inkling: the fields that it reads, its kinds of layers, and its other caches."""

from dataclasses import replace

import jax.numpy as jnp
import pytest
from flax import nnx

from models.decoders.chosen_layer import kind_of
from models.errors import ModelConfigError, UnsupportedModelError
from models.families.inkling import InklingForCausalLM
from models.registry import read_config
from tests.models.families.read_by_transformers import as_transformers_reads_it

FULL, SLIDING = "hybrid", "hybrid_sliding"
HF_CONFIG = {
    "architectures": ["InklingForCausalLM"],
    "model_type": "inkling_text",
    "vocab_size": 400,
    "hidden_size": 64,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
    "n_routed_experts": 8,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 4,
}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"layer_types": [FULL, SLIDING] * 4, "local_layer_ids": [0]},
        {"layer_types": None, "local_layer_ids": [0, 1, 2]},
        {"head_dim": 16, "swa_head_dim": 24, "sliding_window_size": 64, "rel_extent": 96},
        {"sliding_window": 64, "sconv_kernel_size": 3, "model_max_length": 512},
        {"dense_mlp_idx": 2, "dense_intermediate_size": 48},
        {"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 5, "d_rel": 4},
        {"log_scaling_n_floor": 128, "log_scaling_alpha": 0.2},
        {"unpadded_vocab_size": 390, "logits_mup_width_multiplier": 2.0},
        {"n_shared_experts": 1, "route_scale": 2.5, "num_experts_per_tok": 2},
    ],
)
def test_fields_mean_what_they_mean_in_transformers(fields):
    given = {name: value for name, value in (HF_CONFIG | fields).items() if value is not None}
    config = read_config(given)
    assert config == read_config(as_transformers_reads_it(given, "InklingTextConfig"))
    assert (config == read_config(HF_CONFIG)) == (fields == {})


def test_fields_that_do_not_fit_are_refused():
    with pytest.raises(ModelConfigError, match="layer_types is .*; expected a list of 8 names"):
        read_config({**HF_CONFIG, "layer_types": ["full_attention"] * 8})
    with pytest.raises(UnsupportedModelError, match="shared_expert_sink=False"):
        read_config({**HF_CONFIG, "shared_expert_sink": False})


def test_layers_that_differ_only_in_weights_are_of_one_kind():
    config = read_config({**HF_CONFIG, "dense_mlp_idx": 2})
    model = nnx.eval_shape(
        lambda: InklingForCausalLM(config, has_head_kernel=True, dtype=jnp.dtype("float32"))
    )
    kinds = [kind_of(layer) for layer in model.layers]
    # Two dense and six sparse layers. Only layer 5 has full attention.
    assert [kinds.index(kind) for kind in kinds] == [0, 0, 2, 2, 2, 5, 2, 2]


def test_every_layer_keeps_windows_of_four_convolutions():
    layers = read_config(HF_CONFIG).spec("float32").layers
    caches = [dict(layer.caches) for layer in layers]
    assert all(list(of_layer) == ["self_attn", "convolutions"] for of_layer in caches)
    shapes = [of_layer["convolutions"].format.shapes for of_layer in caches]
    assert shapes[4] == ((3, 512), (3, 512), (3, 64), (3, 64))
    assert shapes[5] == ((3, 256), (3, 256), (3, 64), (3, 64))


def test_a_text_part_without_its_sizes_has_those_of_transformers():
    whole = {
        "architectures": ["InklingForConditionalGeneration"],
        "text_config": {"model_type": "inkling_text"},
    }
    given = {**whole["text_config"], "architectures": ["InklingForCausalLM"]}
    theirs = read_config(as_transformers_reads_it(given, "InklingTextConfig"))
    assert read_config(whole) == replace(theirs, has_other_parts=True)
