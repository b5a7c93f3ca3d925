"""`load_model`: dtypes, layouts of files, dummy weights, and errors that name the weights."""

import dataclasses
import json
import logging
import re
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models.decoders.decoder import Decoder
from models.errors import CheckpointError, CheckpointNotFoundError, ModelError, WeightMismatchError
from models.loading.load_model import load_model
from models.loading.module_structure import ModuleStructure
from models.platforms import CPU, TPU
from models.stored_kernels.scaled import ScaledKernel
from tests.end_to_end.split_configs import CONFIGS
from tests.models.loading.parameters_apart import parameters_apart
from tests.oracles.dense_model import dense_logits
from tests.oracles.make_checkpoint import write_random_checkpoint
from tests.oracles.paged_stepper import PagedStepper
from tests.oracles.recipes import write_recipe
from tests.quick_compile import marked_sizes


def rewrite_weights(folder, change):
    """Applies `change` to the dict of weights in the folder's one file."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path)


def test_kernels_are_stored_in_by_out(tmp_path):
    folder = write_random_checkpoint(tmp_path)
    loaded = load_model(folder)
    params = dict(zip(loaded.param_names, loaded.params, strict=True))
    stored = load_file(folder / "model.safetensors")
    np.testing.assert_array_equal(
        params["layers.1.mlp.up_proj.kernel"], stored["model.layers.1.mlp.up_proj.weight"].T
    )
    np.testing.assert_array_equal(params["norm.scale"], stored["model.norm.weight"])
    assert len(params) == len(stored)


def test_shards_load_as_one_file_does(tmp_path):
    whole = load_model(write_random_checkpoint(tmp_path / "whole"))
    sharded = load_model(write_random_checkpoint(tmp_path / "sharded", num_shards=3))
    for one, other in zip(whole.params, sharded.params, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
def test_weights_become_the_dtype_asked_for(tmp_path, stored, wanted):
    folder = write_random_checkpoint(tmp_path, dtype=stored, num_layers=1)
    loaded = load_model(folder, dtype=wanted)
    assert {param.dtype for param in loaded.params} == {jnp.dtype(wanted)}
    exact = load_file(folder / "model.safetensors")["model.norm.weight"].astype(wanted)
    scale = loaded.params[loaded.param_names.index("norm.scale")]
    np.testing.assert_array_equal(np.asarray(scale), exact)


def test_auto_dtype_is_float32_on_cpu_and_the_configs_own_elsewhere(tmp_path):
    loaded = load_model(write_random_checkpoint(tmp_path, dtype="bfloat16", num_layers=1))
    wanted = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    assert loaded.params[0].dtype == wanted
    assert loaded.config.dtype == "bfloat16"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_without_a_dtype_in_the_config_the_weights_decide(tmp_path, dtype):
    folder = write_random_checkpoint(
        tmp_path, dtype=dtype, num_layers=1, extra_config={"torch_dtype": None}
    )
    # A few numbers in another dtype, as of routers and norms, make no difference.
    rewrite_weights(
        folder,
        lambda weights: weights.update(
            {"model.norm.weight": weights["model.norm.weight"].astype(np.float64)}
        ),
    )
    loaded = load_model(folder, platform=TPU())
    assert (loaded.config.dtype, {param.dtype for param in loaded.params}) == (
        dtype,
        {jnp.dtype(dtype)},
    )


def test_bfloat16_model_stays_near_the_exact_one(tmp_path):
    folder = write_random_checkpoint(tmp_path, num_layers=1)
    tokens = {0: [5, 6, 7, 8], 1: [9]}
    rough = PagedStepper(load_model(folder, dtype="bfloat16")).step(tokens)
    for row, row_tokens in tokens.items():
        exact = dense_logits(folder, row_tokens)
        assert rough[row].dtype == np.float32
        # bfloat16 keeps 8 bits; a few roundings in sequence stay below 3 % of the largest logit.
        assert np.abs(rough[row] - exact).max() < 0.03 * np.abs(exact).max()


def test_dummy_weights_need_only_the_config_and_depend_on_the_seed(tmp_path):
    folder = write_random_checkpoint(
        tmp_path, num_layers=1, bias=True, extra_config={"initializer_range": 0.05}
    )
    (folder / "model.safetensors").unlink()
    models = [load_model(folder, load_format="dummy", seed=seed) for seed in (1, 1, 2)]
    loaded = models[0]
    first, same, other = (jax.device_get(model.params) for model in models)
    for one, two in zip(first, same, strict=True):
        np.testing.assert_array_equal(one, two)
    embed_idx = loaded.param_names.index("embed_tokens.embedding")
    assert np.abs(first[embed_idx] - other[embed_idx]).max() > 0
    assert np.std(first[embed_idx]) == pytest.approx(0.05, rel=0.05)
    assert np.all(first[loaded.param_names.index("norm.scale")] == 1)
    assert np.all(first[loaded.param_names.index("layers.0.self_attn.q_proj.bias")] == 0)


def test_dummy_norms_of_gemma_scale_by_one(tmp_path):
    folder = write_random_checkpoint(tmp_path, "gemma3_text", num_layers=1, tie=True)
    loaded = load_model(folder, load_format="dummy")
    params = dict(zip(loaded.param_names, jax.device_get(loaded.params), strict=True))
    assert not np.any(params["norm.offset"])
    assert not np.any(params["layers.0.self_attn.q_norm.offset"])
    # An embedding that is the head too, seven products and seven norms.
    assert len(params) == 15


def test_missing_weights_are_named(tmp_path):
    folder = write_random_checkpoint(tmp_path)
    rewrite_weights(folder, lambda weights: weights.pop("model.layers.2.mlp.down_proj.weight"))
    with pytest.raises(
        WeightMismatchError, match=r"1 missing: model\.layers\.2\.mlp\.down_proj\.weight\."
    ):
        load_model(folder)


def test_many_missing_weights_are_counted(tmp_path):
    folder = write_random_checkpoint(tmp_path, num_layers=2)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    # Two layers of nine weights each, ten of which are listed.
    with pytest.raises(WeightMismatchError, match="18 missing: .* and 8 more"):
        load_model(folder)


def test_unexpected_weights_are_named(tmp_path):
    folder = write_random_checkpoint(tmp_path)
    rewrite_weights(folder, lambda weights: weights.update(extra=np.zeros(3, np.float32)))
    with pytest.raises(WeightMismatchError, match="1 unexpected: extra"):
        load_model(folder)


def test_a_family_may_ignore_weights(tmp_path, monkeypatch):
    folder = write_random_checkpoint(tmp_path)
    extra = {"extra": np.zeros(3, np.float32), "more": np.zeros(3, np.float32)}
    rewrite_weights(folder, lambda weights: weights.update(extra))
    monkeypatch.setattr(Decoder, "ignores_weight", lambda self, name: name == "extra")
    with pytest.raises(WeightMismatchError, match=r"1 unexpected: more\."):
        load_model(folder)


def test_optional_weights_may_be_missing(tmp_path, monkeypatch):
    name = "norm.scale"
    weight_rules = Decoder.weight_rules

    def with_optional_norm(self):
        rules = weight_rules(self)
        source = dataclasses.replace(rules[name].sources[0], is_optional=True)
        rules[name] = dataclasses.replace(
            rules[name],
            sources=(source,),
            combine=lambda arrays: arrays[0] if arrays else np.full(source.shape, 7, np.float32),
        )
        return rules

    monkeypatch.setattr(Decoder, "weight_rules", with_optional_norm)
    folder = write_random_checkpoint(tmp_path, num_layers=1)
    wanted = load_file(folder / "model.safetensors")["model.norm.weight"]
    for expected in (wanted, np.full_like(wanted, 7)):
        loaded = load_model(folder)
        np.testing.assert_array_equal(loaded.params[loaded.param_names.index(name)], expected)
        rewrite_weights(folder, lambda weights: weights.pop("model.norm.weight", None))


def test_bias_that_the_config_does_not_have_is_unexpected(tmp_path):
    folder = write_random_checkpoint(tmp_path, bias=True, num_layers=1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_bias": False}))
    with pytest.raises(WeightMismatchError, match=r"4 unexpected: .*k_proj\.bias"):
        load_model(folder)


def test_misshapen_weight_is_named_with_both_shapes(tmp_path):
    folder = write_random_checkpoint(tmp_path)
    rewrite_weights(
        folder, lambda weights: weights.update({"model.norm.weight": np.ones(63, np.float32)})
    )
    with pytest.raises(
        WeightMismatchError, match=r"model\.norm\.weight \(has shape \[63\], needs \[64\]\)"
    ):
        load_model(folder)


def test_quantized_weight_is_named_with_its_dtype(tmp_path):
    folder = write_random_checkpoint(tmp_path)
    rewrite_weights(
        folder, lambda weights: weights.update({"model.norm.weight": np.ones(64, np.int8)})
    )
    with pytest.raises(WeightMismatchError, match=r"model\.norm\.weight \(I8\)"):
        load_model(folder)


def test_known_leftovers_of_old_checkpoints_are_ignored(tmp_path):
    folder = write_random_checkpoint(tmp_path, tie=True, num_layers=1)

    def leave(weights):
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()

    rewrite_weights(folder, leave)
    loaded = load_model(folder)
    assert loaded.config.tie_word_embeddings
    if "lm_head.kernel" in loaded.param_names:
        head = loaded.params[loaded.param_names.index("lm_head.kernel")]
        embedding = loaded.params[loaded.param_names.index("embed_tokens.embedding")]
        np.testing.assert_array_equal(head, embedding.T)


def test_truncated_file_is_named(tmp_path):
    folder = write_random_checkpoint(tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        load_model(folder)


def test_folder_without_weights_says_what_is_there(tmp_path):
    folder = write_random_checkpoint(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointNotFoundError, match=r"pytorch_model\.bin"):
        load_model(folder)


@pytest.mark.parametrize("argument", [{"dtype": "int8"}, {"load_format": "gguf"}])
def test_unknown_choice_is_refused(tmp_path, argument):
    with pytest.raises(ModelError, match="expected one of auto"):
        load_model(tmp_path, **argument)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("recipe", ["mistral_window", "qwen2_window", "gemma2", "gemma3"])
def test_checkpoint_that_transformers_saved_is_the_same_model(tmp_path, recipe):
    """Its config.json is in the spelling of the installed version, with every field written."""
    make_golden = pytest.importorskip("tests.oracles.make_golden")  # needs torch and transformers
    original = write_recipe(tmp_path / "original", recipe)
    make_golden.load_hf_model(original).save_pretrained(tmp_path / "saved")
    ours, saved = load_model(original), load_model(tmp_path / "saved")
    assert saved.param_names == ours.param_names
    for one, other in zip(ours.params, saved.params, strict=True):
        np.testing.assert_array_equal(one, other)
    # What the dtype of the save and the version write otherwise.
    written = {"dtype": "", "model_type": "", "eos_token_ids": (), "bos_token_id": None}
    assert dataclasses.replace(saved.config, **written) == dataclasses.replace(
        ours.config, **written
    )


@pytest.mark.parametrize("options", [{}, {"panel_width": 64}, {"quantization": "int4"}])
def test_the_memory_of_weights_is_known_before_they_are_read(
    tmp_path, monkeypatch, caplog, options
):
    folder = write_random_checkpoint(tmp_path, hidden_size=128, num_layers=1, vocab_size=2048)
    options = options | {"dtype": "float32"}
    with caplog.at_level(logging.INFO, "models.loading.weight_memory"):
        num_bytes = load_model(folder, **options).device_bytes
    assert f"files, about {num_bytes / 2**20:,.1f} MiB on the device, where " in caplog.text
    monkeypatch.setattr(CPU, "free_bytes_for_weights", lambda self, devices: num_bytes - 1)
    monkeypatch.setattr(ModuleStructure, "fill", None)  # it would read the weights
    with pytest.raises(ModelError, match="the weights need about .* are free. Quantize them"):
        load_model(folder, **options)


def test_weights_are_described_as_in_files_and_on_the_device(tmp_path):
    folder = write_random_checkpoint(tmp_path, hidden_size=128, num_layers=1, vocab_size=2048)
    size = (folder / "model.safetensors").stat().st_size / 2**20
    plain = load_model(folder, dtype="float32")
    assert plain.describe_weights() == (
        f"weights: {size:,.1f} MiB in files, {size:,.1f} MiB on the device"
    )
    kept = load_model(folder, dtype="float32", quantization="int4").describe_weights()
    match = re.fullmatch(rf"weights: {size:,.1f} MiB in files, (.*) MiB on the device, (.*)", kept)
    # The head is half of all weights, and takes an eighth of its bytes and a scale for 128 inputs.
    assert float(match[1]) < 0.65 * size
    assert match[2] == "8 of 8 kernels in 4 or 8 bits"
    dummy = load_model(folder, load_format="dummy", dtype="float32").describe_weights()
    assert dummy == f"weights: {size:,.1f} MiB on the device"


class WithoutStacks(CPU):
    stacks_layers: ClassVar[bool] = False


@pytest.mark.parametrize("quantization", marked_sizes(["none", "int4"], slow=["int8", "fp8"]))
def test_stacks_have_the_numbers_of_their_layers(tmp_path, quantization):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3_moe"]))
    loaded, apart = (
        load_model(
            tmp_path,
            load_format="dummy",
            quantization=quantization,
            quantization_group_size=32,
            platform=platform.of_this_machine(),
        )
        for platform in (CPU, WithoutStacks)
    )
    assert not apart.stack_places
    # Layers 1 and 2 have experts. Matrices of floats are never in stacks.
    wanted = [
        f"layers.{layer_idx}.mlp.experts.{name}.kernel"
        for layer_idx in (1, 2)
        for name in ("down_proj", "gate_proj", "up_proj")
    ]
    if quantization != "none":
        wanted += [
            f"layers.{layer_idx}.self_attn.{name}.kernel"
            for layer_idx in range(3)
            for name in ("k_proj", "o_proj", "q_proj", "v_proj")
        ]
    assert sorted(loaded.stack_places) == sorted(wanted)
    values = parameters_apart(loaded)
    assert values.keys() == apart.parameters.keys()
    for name in wanted:
        assert isinstance(values[name], ScaledKernel) == (quantization != "none")
    for name, value in apart.parameters.items():
        assert jax.tree.structure(values[name]) == jax.tree.structure(value)
        jax.tree.map(np.testing.assert_array_equal, values[name], value)
    assert loaded.device_bytes == apart.device_bytes
    assert loaded.describe_weights() == apart.describe_weights()
