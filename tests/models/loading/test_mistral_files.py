"""Mistral's own files give the model that the same weights give in Hugging Face layout."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ModelConfigError,
    UnsupportedModelError,
    WeightMismatchError,
)
from models.loading.load_model import load_model
from models.loading.mistral_files import make_mistral_config
from tests.oracles.make_checkpoint import write_random_checkpoint

NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "model.layers": "layers",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "block_sparse_moe": "feed_forward",
}
PARAMS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
    "rope_theta": "rope_theta",
    "max_seq_len": "max_position_embeddings",
    "tied_embeddings": "tie_word_embeddings",
}


def convert(folder, out, **more):
    """Writes Mistral's own files of a checkpoint in Hugging Face layout."""
    config = json.loads((folder / "config.json").read_text())
    params = {name: config[own] for name, own in PARAMS.items() if own in config} | more
    weights = {}
    for name, weight_np in load_file(folder / "model.safetensors").items():
        for own, theirs in NAMES.items():
            name = name.replace(own, theirs)
        if name.endswith(("wq.weight", "wk.weight")):
            # Rows of a head from 0, 1, 2, 3, ... to 0, half, 1, half + 1, ...
            half = config["head_dim"] // 2
            order = np.stack([np.arange(half), half + np.arange(half)], axis=1).ravel()
            heads = weight_np.reshape(-1, 2 * half, weight_np.shape[1])
            weight_np = heads[:, order].reshape(weight_np.shape)
        weights[name] = weight_np
    out.mkdir()
    (out / "params.json").write_text(json.dumps(params))
    save_file(weights, out / "consolidated.safetensors")
    return out


@pytest.mark.parametrize("tie", [False, True])
def test_both_layouts_give_the_same_model(tmp_path, tie):
    window = {"sliding_window": None if tie else 16}
    folder = write_random_checkpoint(
        tmp_path / "hf", "mistral", rope_theta=1e6, tie=tie, extra_config=window
    )
    got = load_model(convert(folder, tmp_path / "own", **window))
    wanted = load_model(folder)
    assert got.param_names == wanted.param_names
    for name, one, other in zip(got.param_names, got.params, wanted.params, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other), err_msg=name)
    assert got.config.attention == wanted.config.attention
    assert got.config.eos_token_ids == (2,)


def write_mixtral(folder):
    """Writes a Mistral with four random experts in place of each MLP."""
    write_random_checkpoint(folder, "mistral", rope_theta=1e6)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    config |= {"num_local_experts": 4, "num_experts_per_tok": 3}
    (folder / "config.json").write_text(json.dumps(config))
    path, rng = folder / "model.safetensors", np.random.default_rng(0)
    weights = load_file(path)
    for name in [name for name in weights if ".mlp." in name]:
        shape, part = weights.pop(name).shape, name.split(".")[-2]
        layer = name.partition(".mlp.")[0] + ".block_sparse_moe"
        weights[f"{layer}.gate.weight"] = rng.normal(size=(4, 64)).astype(np.float32)
        number = {"gate_proj": 1, "down_proj": 2, "up_proj": 3}[part]
        for idx in range(4):
            values_np = rng.normal(size=shape).astype(np.float32)
            weights[f"{layer}.experts.{idx}.w{number}.weight"] = values_np
    save_file(weights, path)
    return folder


def test_experts_give_the_same_model(tmp_path):
    folder = write_mixtral(tmp_path / "hf")
    experts = {"num_experts": 4, "num_experts_per_tok": 3}
    got, wanted = load_model(convert(folder, tmp_path / "own", moe=experts)), load_model(folder)
    assert got.param_names == wanted.param_names
    for name, one, other in zip(got.param_names, got.params, wanted.params, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other), err_msg=name)
    assert got.config.num_experts_per_tok == wanted.config.num_experts_per_tok == 3


def test_weights_in_several_files_are_found_by_their_index(tmp_path):
    folder = write_random_checkpoint(tmp_path / "hf", "mistral")
    own = convert(folder, tmp_path / "own")
    whole = load_model(own)
    weights = load_file(own / "consolidated.safetensors")
    (own / "consolidated.safetensors").unlink()
    of_weights = {}
    for number, name in enumerate(weights):
        of_weights[name] = f"consolidated-0000{1 + number % 2}-of-00002.safetensors"
    for file in set(of_weights.values()):
        save_file({name: weights[name] for name in weights if of_weights[name] == file}, own / file)
    index = own / "consolidated.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": of_weights}))
    for one, other in zip(load_model(own).params, whole.params, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_config_json_is_used_if_there_is_one(tmp_path):
    folder = write_random_checkpoint(tmp_path / "hf", "mistral")
    own = convert(folder, tmp_path / "own")
    (own / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(CheckpointNotFoundError, match="has neither model.safetensors"):
        load_model(own)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"moe": {"num_experts": 8}}, UnsupportedModelError, "has moe; paxkv reads"),
        (
            {"moe": {"num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 1}},
            UnsupportedModelError,
            "has moe; paxkv reads",
        ),
        ({"quantization": {"qformat_weight": "fp8"}}, UnsupportedModelError, "has quantization"),
        ({"rope_theta": None}, ModelConfigError, "has no rope_theta"),
    ],
)
def test_other_models_are_refused_with_the_field(tmp_path, change, error, message):
    own = convert(write_random_checkpoint(tmp_path / "hf", "mistral"), tmp_path / "own", **change)
    with pytest.raises(error, match=message):
        make_mistral_config(own)


def test_missing_cut_and_unknown_weights_are_named(tmp_path):
    folder = write_random_checkpoint(tmp_path / "hf", "mistral")
    own = convert(folder, tmp_path / "own")
    path = own / "consolidated.safetensors"
    whole = path.read_bytes()
    save_file({**load_file(path), "layers.0.gate.weight": np.ones(3, np.float32)}, path)
    with pytest.raises(WeightMismatchError, match="1 unexpected: layers.0.gate.weight"):
        load_model(own)
    path.write_bytes(whole[:-5])
    with pytest.raises(CheckpointError, match="consolidated.safetensors is truncated"):
        load_model(own)
    path.unlink()
    with pytest.raises(CheckpointNotFoundError, match="consolidated.safetensors does not exist"):
        load_model(own)
