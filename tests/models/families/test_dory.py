"""Dory: its two ways to count and name layers, its passes, and the fields that it reads."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from models import load_model
from models.decoders.chosen_layer import kind_of
from models.errors import ModelConfigError, UnsupportedModelError
from models.families.dory import DoryForCausalLM
from models.layers.loop_entry import LoopEntry
from models.registry import read_config
from tests.models.families.read_by_transformers import as_transformers_reads_it

SLIDING, FULL = "sliding_attention", "full_attention"
HF_CONFIG = {
    "architectures": ["DoryForCausalLM"],
    "model_type": "dory",
    "vocab_size": 400,
    "hidden_size": 64,
    "intermediate_size": 16,
    "num_hidden_layers": 5,
    "n_input_layers": 1,
    "n_output_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
}
PAIRS = {
    "num_hidden_layers": 10,
    "n_input_layers": 2,
    "n_output_layers": 4,
    "layer_types": [SLIDING, "mlp", SLIDING, "mlp", SLIDING, "mlp", FULL, "mlp", SLIDING, "mlp"],
}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        PAIRS,
        {"num_hidden_layers": 20, "n_input_layers": None, "n_output_layers": None},
        {"num_key_value_heads": None, "num_attention_heads": 8, "head_dim": None},
        {"n_recurrent_loops": 4, "n_recurrent_layers": 2, "ngpt_alpha_init": 0.5},
        {"sliding_window": 64, "layer_types": [FULL, SLIDING, FULL, SLIDING, FULL]},
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        {"initializer_range": 0.2, "hidden_act": "gelu", "max_position_embeddings": 512},
        {
            "rope_parameters": {
                FULL: {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0},
                SLIDING: {"rope_type": "default", "rope_theta": 5e3},
            }
        },
    ],
)
def test_fields_mean_what_they_mean_in_transformers(fields):
    given = {name: value for name, value in (HF_CONFIG | fields).items() if value is not None}
    config = read_config(given)
    assert config == read_config(as_transformers_reads_it(given, "DoryConfig"))
    assert (config == read_config(HF_CONFIG)) == (fields in ({}, PAIRS))


def make_model(**fields: object) -> DoryForCausalLM:
    config = read_config(HF_CONFIG | fields)
    return nnx.eval_shape(
        lambda: DoryForCausalLM(config, has_head_kernel=True, dtype=jnp.dtype("float32"))
    )


def test_each_pass_has_a_cache_and_the_weights_of_its_layer():
    model = make_model(n_recurrent_loops=3)
    # Layers 1 and 2 of 5 run three times, after an entry.
    assert model.config.stored_layers == (0, *(None, 1, 2) * 3, 3, 4)
    names = [layer.full_name("self_attn") for layer in model.config.spec("float32").layers]
    own = model.config.spec("float32").own_formats
    assert [place for place, name in enumerate(names) if name in own] == [
        0,
        2,
        3,
        5,
        6,
        8,
        9,
        10,
        11,
    ]
    windows = [layer and layer.sliding_window for layer in model.config.attention]
    assert windows == [1024, *(None, 1024, 1024) * 3, None, 1024]
    for first, later in ((2, 5), (3, 6), (2, 8), (3, 9)):
        assert model.layers[first] is model.layers[later]
    entries = [layer.is_first for layer in model.layers if isinstance(layer, LoopEntry)]
    assert entries == [True, False, False]


def test_layers_are_of_two_kinds_and_entries_too():
    kinds = [kind_of(layer) for layer in make_model(n_recurrent_loops=3).layers]
    sliding, full, first, later = 0, 10, 1, 4
    passes = [sliding, sliding]
    wanted = [sliding, first, *passes, later, *passes, later, *passes, full, sliding]
    assert [kinds.index(kind) for kind in kinds] == wanted


def test_weights_have_the_names_that_transformers_writes():
    rules = make_model().weight_rules()
    names = {
        "embed_tokens.embedding": "backbone.embeddings.weight",
        "layers.0.self_attn.gate_proj.kernel": "backbone.layers.0.self_attn.g_proj.weight",
        "layers.0.self_attn.gate.stored": "backbone.layers.0.self_attn.s_gate",
        "layers.2.self_attn.sqk.stored": "backbone.layers.1.self_attn.sqk",
        "layers.3.mlp.gate_proj.kernel": "backbone.layers.2.mlp.gate_proj.weight",
        "layers.7.lambda_2.stored": "backbone.layers.3.lambda_2",
        "logit_scale.stored": "lm_head.logit_scale",
        "lm_head.kernel": "lm_head.weight",
    }
    for name, stored in names.items():
        assert [source.name for source in rules[name].sources] == [stored]
    assert "layers.5.lambda_1.stored" not in rules


@pytest.mark.parametrize(
    ("of_hub", "of_transformers"),
    [
        ("backbone.layers.6.mixer.g_proj.weight", "backbone.layers.3.self_attn.g_proj.weight"),
        ("backbone.layers.6.mixer.s_gate", "backbone.layers.3.self_attn.s_gate"),
        ("backbone.layers.7.mixer.gate_proj.weight", "backbone.layers.3.mlp.gate_proj.weight"),
        ("backbone.layers.7.mixer.suv_up", "backbone.layers.3.mlp.suv_up"),
        ("backbone.layers.6.attn_alpha", "backbone.layers.3.lambda_1"),
        ("backbone.layers.17.mlp_alpha", "backbone.layers.8.lambda_2"),
        ("backbone.layers.3.self_attn.sqk", "backbone.layers.3.self_attn.sqk"),
        ("backbone.layers.3.lambda_2", "backbone.layers.3.lambda_2"),
        ("lm_head.logit_scale", "lm_head.logit_scale"),
    ],
)
def test_names_of_the_hub_are_read_too(of_hub, of_transformers):
    assert make_model().name_weight(of_hub) == of_transformers
    loading = pytest.importorskip("transformers.core_model_loading")
    assert loading.LayerPairCollapse().rename_source_key(of_hub)[0] == of_transformers


def test_checkpoint_of_the_hub_has_the_weights_of_the_saved_one(tmp_path):
    families = pytest.importorskip("tests.oracles.families")  # needs torch and transformers
    model, _ = families.build("dory", 1)
    families.finish(model, tmp_path)
    saved = load_model(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    of_hub = {_name_of_hub(name): weight for name, weight in stored.items()}
    assert len(of_hub.keys() - stored.keys()) == len(stored) - 3  # all but the ends
    save_file(of_hub, tmp_path / "model.safetensors")
    published = load_model(tmp_path)
    assert published.param_names == saved.param_names
    for one, other in zip(published.params, saved.params, strict=True):
        np.testing.assert_array_equal(one, other)


def _name_of_hub(name: str) -> str:
    base, *rest = name.split(".")
    if rest[0] != "layers":
        return name
    idx, part = 2 * int(rest[1]), rest[2]
    names = {"self_attn": (idx, "mixer"), "mlp": (idx + 1, "mixer")}
    names |= {"lambda_1": (idx, "attn_alpha"), "lambda_2": (idx + 1, "mlp_alpha")}
    return ".".join([base, "layers", *map(str, names[part]), *rest[3:]])


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"recurrent_kv_cache_mode": "last_loop"}, UnsupportedModelError, "'last_loop'"),
        ({"n_recurrent_layers": 3}, ModelConfigError, "expected num_hidden_layers=5 as their sum"),
        ({"n_output_layers": 5}, ModelConfigError, "n_recurrent_layers=0 with .* as their sum"),
        ({"n_recurrent_loops": 0}, ModelConfigError, "n_recurrent_loops is 0"),
        (PAIRS | {"n_input_layers": 3}, ModelConfigError, "even numbers of layers"),
        (PAIRS | {"layer_types": ["mlp", FULL] * 5}, ModelConfigError, "by turns"),
        ({"rope_parameters": {FULL: {}, SLIDING: {}}}, ModelConfigError, "no rope_theta"),
        ({"layer_types": [FULL]}, ModelConfigError, "a list of 5 names"),
    ],
)
def test_fields_that_are_not_computed_are_refused(fields, error, message):
    with pytest.raises(error, match=message):
        read_config(HF_CONFIG | fields)
