"""Small random checkpoints of models and of their draft heads."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

# Of what layers add to the residual stream.
_LAYER_SCALE = 0.05


def make_mtp_checkpoint(folder: Path, *, family: str, seed: int, vocab_size: int) -> None:
    """Writes a model of one layer and a head, whose next tokens depend mostly on the last token.

    The head copies the embedding of the last token, to which the model adds little. So the head is
    often right, but not always.
    """
    from tests.oracles import families

    families.make_mtp(family, folder, seed)
    config = json.loads((folder / "config.json").read_text())
    path = folder / "model.safetensors"
    head_prefix, prefix = f"model.layers.{config['num_hidden_layers']}.", "model.layers.1."
    weights = {
        name.replace(head_prefix, prefix): weight
        for name, weight in load_file(path).items()
        if name.startswith((head_prefix, "model.layers.0.")) or "layers" not in name
    }
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][:vocab_size]
    _shrink_layers(weights)
    hidden_size = config["hidden_size"]
    copy = np.concatenate([np.eye(hidden_size), np.zeros((hidden_size, hidden_size))], axis=1)
    weights[f"{prefix}eh_proj.weight"] = copy.astype(np.float32)
    weights[f"{prefix}enorm.weight"] = np.ones(hidden_size, np.float32)
    weights[f"{prefix}shared_head.norm.weight"] = weights["model.norm.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    config |= {"vocab_size": vocab_size, "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))


def make_llama_checkpoint(folder: Path, *, seed: int, vocab_size: int, num_layers: int) -> None:
    """Writes a model whose next token depends mostly on the last token.

    With one layer, of three at most, it is a draft model for a model with more.
    """
    from tests.oracles import families

    families.make("llama", folder, seed)
    path, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    weights = {
        name: weight[:vocab_size] if weight.shape[0] == config["vocab_size"] else weight
        for name, weight in load_file(path).items()
        if not name.startswith(tuple(f"model.layers.{idx}." for idx in range(num_layers, 3)))
    }
    _shrink_layers(weights)
    save_file(weights, path, metadata={"format": "pt"})
    config |= {"vocab_size": vocab_size, "num_hidden_layers": num_layers}
    (folder / "config.json").write_text(json.dumps(config))


def _shrink_layers(weights: dict[str, np.ndarray]) -> None:
    """Makes the embedding much larger than what the layers add to it."""
    embedding = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = embedding / embedding.std(axis=1, keepdims=True)
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = weight * np.float32(_LAYER_SCALE)
