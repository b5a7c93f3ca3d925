"""The same families without a cache, in plain NumPy float64: the truth where torch is missing.

It reads the checkpoint files itself and shares no code with `models`.
"""

import json
import math
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file


def dense_logits(folder: Path, token_ids: list[int]) -> np.ndarray:  # f64[num_tokens, vocab]
    """Runs a whole sequence at once and returns the logits of every position."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights = {
        name: array.astype(np.float64)
        for path in sorted(folder.glob("*.safetensors"))
        for name, array in load_file(path).items()
    }
    hidden = weights["model.embed_tokens.weight"][token_ids]
    angles, scale = _angles(config, len(token_ids))
    for layer_idx in range(config["num_hidden_layers"]):
        layer = _Layer(config, weights, f"model.layers.{layer_idx}")
        hidden = hidden + layer.attend(layer.norm("input_layernorm", hidden), angles, scale)
        hidden = hidden + layer.mlp(layer.norm("post_attention_layernorm", hidden))
    hidden = _rms_norm(hidden, weights["model.norm.weight"], config["rms_norm_eps"])
    head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    return hidden @ weights[head].T


class _Layer:
    """One decoder layer, with its weights looked up by their checkpoint names."""

    def __init__(
        self, config: dict[str, object], weights: dict[str, np.ndarray], prefix: str
    ) -> None:
        self.config, self.weights, self.prefix = config, weights, prefix

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        scale = self.weights[f"{self.prefix}.{name}.weight"]
        return _rms_norm(x, scale, self.config["rms_norm_eps"])

    def project(self, name: str, x: np.ndarray) -> np.ndarray:
        out = x @ self.weights[f"{self.prefix}.{name}.weight"].T
        return out + self.weights.get(f"{self.prefix}.{name}.bias", 0.0)

    def attend(self, x: np.ndarray, angles: np.ndarray, scale: float) -> np.ndarray:
        num_tokens, head_dim = len(x), self.config["head_dim"]
        q = self.project("self_attn.q_proj", x).reshape(num_tokens, -1, head_dim)
        k = self.project("self_attn.k_proj", x).reshape(num_tokens, -1, head_dim)
        v = self.project("self_attn.v_proj", x).reshape(num_tokens, -1, head_dim)
        if f"{self.prefix}.self_attn.q_norm.weight" in self.weights:
            q, k = self.norm("self_attn.q_norm", q), self.norm("self_attn.k_norm", k)
        q, k = _rotate(q, angles, scale), _rotate(k, angles, scale)
        num_q_per_kv = q.shape[1] // k.shape[1]
        out = np.empty_like(q)
        for head_idx in range(q.shape[1]):
            kv_idx = head_idx // num_q_per_kv
            scores = q[:, head_idx] @ k[:, kv_idx].T / math.sqrt(head_dim)
            scores[np.triu_indices(num_tokens, 1)] = -np.inf
            probs = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, head_idx] = probs @ v[:, kv_idx] / probs.sum(axis=1, keepdims=True)
        return self.project("self_attn.o_proj", out.reshape(num_tokens, -1))

    def mlp(self, x: np.ndarray) -> np.ndarray:
        gate = self.project("mlp.gate_proj", x)
        gated = gate / (1 + np.exp(-gate)) * self.project("mlp.up_proj", x)
        return self.project("mlp.down_proj", gated)


def _rms_norm(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return scale * x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)


def _rotate(x: np.ndarray, angles: np.ndarray, scale: float) -> np.ndarray:
    # Dimension i and i + head_dim / 2 are the two parts of one complex number.
    real, imaginary = np.split(x, 2, axis=-1)
    turned = (real + 1j * imaginary) * scale * np.exp(1j * angles)[:, None, :]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def _angles(
    config: dict[str, object], num_tokens: int
) -> tuple[np.ndarray, float]:  # f64[num_tokens, head_dim // 2]
    """Returns the angle of each position and dimension pair, and the factor of cos and sin."""
    rope, theta, dim = config["rope_scaling"] or {}, config["rope_theta"], config["head_dim"]
    kind, factor = rope.get("rope_type") or rope.get("type"), rope.get("factor")
    pair = np.arange(dim // 2)
    position = np.arange(num_tokens)[:, None]
    freq = theta ** (-2.0 * pair / dim)
    if kind is None:
        return position * freq, 1.0
    if kind == "linear":
        return position / factor * freq, 1.0
    if kind == "dynamic":
        # Each position with the base of the sequence that ends there, as generation with a cache
        # has it.
        max_length = config["max_position_embeddings"]
        growth = np.maximum(position + 1, max_length) / max_length * factor - (factor - 1)
        return position * (theta * growth ** (dim / (dim - 2))) ** (-2.0 * pair / dim), 1.0
    length = rope["original_max_position_embeddings"]
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = np.clip((length * freq / (2 * np.pi) - low) / (high - low), 0, 1)
        return position * (kept * freq + (1 - kept) * freq / factor), 1.0
    assert kind == "yarn", kind
    # Default betas: pairs with over 32 turns in the original length are kept, under 1 are slowed.
    bound = [dim * np.log(length / (2 * np.pi * turns)) / (2 * np.log(theta)) for turns in (32, 1)]
    first, last = max(np.floor(bound[0]), 0), min(np.ceil(bound[1]), dim - 1)
    slowed = np.clip((pair - first) / (last - first), 0, 1)
    return position * freq * (slowed / factor + 1 - slowed), 0.1 * np.log(factor) + 1
