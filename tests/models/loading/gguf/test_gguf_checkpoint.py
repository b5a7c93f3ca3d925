"""GGUF files give the model that the same weights give in Hugging Face layout."""

import dataclasses
import json
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file

from models.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ModelError,
    UnsupportedModelError,
    WeightMismatchError,
)
from models.loading.gguf import find_gguf_file, make_config, read_gguf
from models.loading.gguf.gguf_checkpoint import GGUFCheckpoint
from models.loading.gguf.gguf_file import TENSOR_TYPES
from models.loading.load_model import load_model
from models.loading.source import read_model_config, resolve_model_folder
from tests.models.loading.gguf.write_gguf import convert, metadata_of, write_gguf
from tests.oracles.make_checkpoint import write_random_checkpoint

# Blocks of K types have 256 numbers.
SIZES = {
    **{"hidden_size": 256, "intermediate_size": 512, "num_layers": 1},
    **{"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64},
}


def encoder_of(type_name: str):
    """Quantizes with the package `gguf`. It cannot quantize to K types: their blocks are drawn."""
    quants = pytest.importorskip("gguf.quants")
    kind = quants.GGMLQuantizationType[type_name]
    rng = np.random.default_rng(0)

    def encode(weight_np):
        if type_name.endswith("_K"):
            num_blocks = weight_np.shape[1] // 256
            size = quants.GGML_QUANT_SIZES[kind][1]
            blocks = rng.integers(0, 256, (weight_np.shape[0], num_blocks, size), np.uint8)
            # Scales in float16, which must be small: the first 4 bytes, or the last 2.
            places = (slice(0, 2), slice(2, 4)) if type_name == "Q4_K" else (slice(-2, None),)
            for place in places:
                scales = rng.uniform(1e-5, 1e-4, blocks.shape[:2]).astype(np.float16)
                blocks[..., place] = scales[..., None].view(np.uint8)
            rows = blocks.reshape(weight_np.shape[0], -1)
        else:
            rows = quants.quantize(weight_np, kind)
        return rows, quants.dequantize(rows, kind).reshape(weight_np.shape)

    return encode


def assert_same_model(got, wanted) -> None:
    assert got.param_names == wanted.param_names
    for name, one, other in zip(got.param_names, got.params, wanted.params, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other), err_msg=name)
    # The ends of answers are those of the file.
    same = {"eos_token_ids": (), "bos_token_id": None, "dtype": None}
    same = {name: value for name, value in same.items() if hasattr(got.config, name)}
    assert dataclasses.replace(got.config, **same) == dataclasses.replace(wanted.config, **same)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("tie", [False, True])
def test_float32_file_gives_the_same_model(tmp_path, family, tie):
    folder = write_random_checkpoint(tmp_path / "hf", family, tie=tie, rope_theta=5e5)
    path = convert(folder, tmp_path / "model.gguf")
    loaded = load_model(path)
    assert_same_model(loaded, load_model(folder))
    assert loaded.config.eos_token_ids == (2, 5)
    assert loaded.file_bytes == path.stat().st_size


def test_float16_matrices_are_read_and_give_the_dtype(tmp_path):
    folder = write_random_checkpoint(tmp_path / "hf")
    as_float16 = lambda w: (w.astype(np.float16), w.astype(np.float16).astype(np.float32))  # noqa: E731
    path = convert(folder, tmp_path / "model.gguf", type_name="F16", encode=as_float16)
    assert_same_model(load_model(path, dtype="float32"), load_model(folder, dtype="float32"))
    assert read_model_config(path).dtype == "float16"


@pytest.mark.parametrize("type_name", ["Q4_0", "Q8_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_quantized_file_gives_the_dequantized_model(tmp_path, family, type_name):
    folder = write_random_checkpoint(tmp_path / "hf", family, **SIZES)
    before = load_file(folder / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    path = convert(
        folder, tmp_path / "model.gguf", type_name=type_name, encode=encoder_of(type_name)
    )
    after = load_file(folder / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    assert (before != after).any() and np.abs(after).max() > 0
    assert_same_model(load_model(path, dtype="float32"), load_model(folder, dtype="float32"))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_transformers_reads_the_same_weights_from_the_file(tmp_path, family):
    """So the names and the order of rows in these tests are those of llama.cpp."""
    pytest.importorskip("gguf")
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")
    folder = write_random_checkpoint(tmp_path / "hf", family)
    path = convert(folder, tmp_path / "model.gguf")
    config = transformers.AutoConfig.from_pretrained(folder)
    read = modeling.load_gguf_checkpoint(
        str(path),
        return_tensors=True,
        model_to_load=transformers.AutoModelForCausalLM.from_config(config),
    )["tensors"]
    for name, weight_np in load_file(folder / "model.safetensors").items():
        np.testing.assert_array_equal(read[name].float().numpy(), weight_np, err_msg=name)


def test_block_sizes_are_those_of_the_package():
    gguf = pytest.importorskip("gguf")
    for number, (name, block_size, block_bytes) in TENSOR_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert kind.name == name and gguf.GGML_QUANT_SIZES[kind] == (block_size, block_bytes)


def test_rope_factors_of_llama_3_become_divisors_of_frequencies(tmp_path):
    folder = write_random_checkpoint(tmp_path / "hf")
    factors = np.linspace(1, 8, 8, dtype=np.float32)  # of 16 dimensions
    more = {"rope_freqs.weight": ("F32", (8,), factors.tobytes())}
    config = load_model(convert(folder, tmp_path / "model.gguf", more=more)).config
    rope = config.attention[0].rope
    assert rope.kind == "longrope" and rope.attention_factor == 1.0
    assert rope.short_factors == rope.long_factors == tuple(factors.tolist())


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling_is_read(tmp_path, kind):
    folder = write_random_checkpoint(tmp_path / "hf", "qwen3")
    metadata = metadata_of(folder) | {
        "qwen3.rope.scaling.type": kind,
        "qwen3.rope.scaling.factor": 4.0,
        "qwen3.rope.scaling.original_context_length": 32,
    }
    wanted = {"rope_type": kind, "factor": 4.0}
    if kind == "yarn":
        wanted["original_max_position_embeddings"] = 32
    path = convert(folder, tmp_path / "model.gguf", metadata=metadata)
    assert make_config(read_gguf(path))["rope_scaling"] == wanted


def test_folder_with_one_file_is_this_file(tmp_path):
    path = convert(write_random_checkpoint(tmp_path / "hf"), tmp_path / "model.gguf")
    assert resolve_model_folder(tmp_path) == resolve_model_folder(path) == path
    (tmp_path / "other.gguf").write_bytes(b"")
    with pytest.raises(CheckpointNotFoundError, match="has 2 GGUF files: model.gguf, other.gguf"):
        resolve_model_folder(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert find_gguf_file(tmp_path) is None


@pytest.mark.parametrize("num_bytes", [0, 3, 20, 200, -1])
def test_cut_file_is_refused(tmp_path, num_bytes):
    path = convert(write_random_checkpoint(tmp_path / "hf"), tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(CheckpointError, match="Download it again"):
        load_model(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba'; paxkv reads GGUF files of"),
        ({"llama.expert_count": 8}, "llama.expert_count is 8; experts"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count is 8"),
        ({"llama.rope.scaling.type": "other"}, "rope.scaling.type is 'other'"),
        ({"split.count": 3}, "one of 3 parts"),
    ],
)
def test_other_models_are_refused_with_the_field(tmp_path, change, message):
    folder = write_random_checkpoint(tmp_path / "hf")
    path = convert(folder, tmp_path / "model.gguf", metadata=metadata_of(folder) | change)
    with pytest.raises(UnsupportedModelError, match=message):
        read_model_config(path)


def test_values_that_are_missing_or_of_another_type_are_named(tmp_path):
    folder = write_random_checkpoint(tmp_path / "hf")
    fields = metadata_of(folder)
    del fields["llama.block_count"]
    path = convert(folder, tmp_path / "model.gguf", metadata=fields)
    with pytest.raises(ModelError, match="llama.block_count is None; expected an integer"):
        read_model_config(path)
    fields = metadata_of(folder) | {"llama.feed_forward_length": [96, 96, 64]}
    path = convert(folder, tmp_path / "model.gguf", metadata=fields)
    with pytest.raises(ModelError, match="feed_forward_length is array.*same for all layers"):
        read_model_config(path)


def test_tensors_of_another_type_or_name_are_refused(tmp_path):
    folder = write_random_checkpoint(tmp_path / "hf")
    unknown = {"blk.0.ssm_in.weight": ("F32", (4, 8), bytes(128))}
    with pytest.raises(WeightMismatchError, match="1 unexpected: blk.0.ssm_in.weight"):
        load_model(convert(folder, tmp_path / "a.gguf", more=unknown))
    other_type = {"output.bias": ("IQ2_XXS", (1, 256), bytes(66))}
    with pytest.raises(UnsupportedModelError, match="output.bias has the type number 16"):
        load_model(convert(folder, tmp_path / "b.gguf", more=other_type))


def test_quantized_file_without_the_package_says_what_to_install(tmp_path, monkeypatch):
    folder = write_random_checkpoint(tmp_path / "hf")
    more = {"output.bias": ("Q8_0", (1, 32), bytes(34))}
    path = convert(folder, tmp_path / "model.gguf", more=more)
    monkeypatch.setitem(sys.modules, "gguf.quants", None)
    with pytest.raises(ModelError, match=r"pip install 'paxkv\[gguf\]'"):
        GGUFCheckpoint(path)


def test_file_of_another_version_or_byte_order_is_refused(tmp_path):
    for version, message in ((4, "GGUF file of version 4"), (3 << 24, "big-endian GGUF file")):
        path = write_gguf(tmp_path / "model.gguf", {}, {}, version=version)
        with pytest.raises(UnsupportedModelError, match=message):
            read_gguf(path)
    (tmp_path / "model.gguf").write_text(json.dumps({}))
    with pytest.raises(CheckpointError, match="is not a GGUF file"):
        read_gguf(tmp_path / "model.gguf")
