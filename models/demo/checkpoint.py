"""Reads and writes the demo checkpoint in the standard Hugging Face layout."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save
from tokenizers import Tokenizer

from models.demo.tokenizer_training import END_OF_TEXT, TURN_END, save_tokenizer
from models.demo.training_model import DemoModel, DemoModelConfig


def _checkpoint_name(path: tuple[str | int, ...]) -> tuple[str, bool]:
    """Maps a flax path to its Hugging Face name, and says whether the array is transposed.

    ('layers', 0, 'mlp', 'up_proj', 'kernel') -> ('model.layers.0.mlp.up_proj.weight', True):
    flax keeps kernels [in, out], PyTorch keeps weights [out, in].
    """
    *owner, leaf = path
    return "model." + ".".join(str(part) for part in owner) + ".weight", leaf == "kernel"


def checkpoint_weights(model: DemoModel) -> dict[str, np.ndarray]:
    """Returns every weight under its Hugging Face name, float32."""
    weights = {}
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        name, is_transposed = _checkpoint_name(path)
        array = np.asarray(variable[...], np.float32)
        weights[name] = np.ascontiguousarray(array.T if is_transposed else array)
    return weights


def _hf_config(config: DemoModelConfig, tokenizer: Tokenizer) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **dataclasses.asdict(config),
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "rope_scaling": None,
        "pretraining_tp": 1,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(TURN_END),
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "torch_dtype": "float32",
    }


def save_checkpoint(model: DemoModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes weights, configuration, tokenizer and generation defaults."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = save(checkpoint_weights(model), metadata={"format": "pt"})
    (folder / "model.safetensors").write_bytes(weights)
    config = _hf_config(model.config, tokenizer)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {
        "do_sample": False,
        "eos_token_id": [config["eos_token_id"], config["pad_token_id"]],
        "pad_token_id": config["pad_token_id"],
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    save_tokenizer(tokenizer, folder, max_positions=model.config.max_position_embeddings)


def load_checkpoint(folder: Path) -> tuple[DemoModel, Tokenizer]:
    """Loads what `save_checkpoint` wrote into the training model."""
    saved = json.loads((folder / "config.json").read_text())
    names = {field.name for field in dataclasses.fields(DemoModelConfig)}
    config = DemoModelConfig(**{name: value for name, value in saved.items() if name in names})
    # Shapes only: drawing initial weights would take longer than reading the stored ones.
    model = nnx.eval_shape(lambda: DemoModel(config, rngs=nnx.Rngs(0)))
    weights = load_file(folder / "model.safetensors")
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        name, is_transposed = _checkpoint_name(path)
        array = weights[name]
        variable.set_value(jnp.asarray(array.T if is_transposed else array))
    return model, Tokenizer.from_file(str(folder / "tokenizer.json"))
