"""The same families without a cache, in plain NumPy float64: the truth where torch is missing.

It reads the checkpoint files itself and shares no code with `models`.
"""

import json
import math
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

GEMMA = ("gemma2", "gemma3_text")


def dense_logits(folder: Path, token_ids: list[int]) -> np.ndarray:  # f64[num_tokens, vocab]
    """Runs a whole sequence at once and returns the logits of every position."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights = {
        name: array.astype(np.float64)
        for path in sorted(folder.glob("*.safetensors"))
        for name, array in load_file(path).items()
    }
    is_gemma = config["model_type"] in GEMMA
    hidden = weights["model.embed_tokens.weight"][token_ids]
    if is_gemma:
        hidden = hidden * math.sqrt(config["hidden_size"])
    for layer_idx, is_sliding in enumerate(sliding_layers(config)):
        layer = _Layer(config, weights, f"model.layers.{layer_idx}", is_sliding)
        if is_gemma:
            out = layer.attend(layer.norm("input_layernorm", hidden))
            hidden = hidden + layer.norm("post_attention_layernorm", out)
            out = layer.mlp(layer.norm("pre_feedforward_layernorm", hidden))
            hidden = hidden + layer.norm("post_feedforward_layernorm", out)
        else:
            hidden = hidden + layer.attend(layer.norm("input_layernorm", hidden))
            hidden = hidden + layer.mlp(layer.norm("post_attention_layernorm", hidden))
    hidden = _rms_norm(config, hidden, weights["model.norm.weight"])
    head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    return _soft_cap(hidden @ weights[head].T, config.get("final_logit_softcapping"))


def sliding_layers(config: dict[str, object]) -> list[bool]:
    """Says of each layer whether it attends to a window."""
    num_layers, family = config["num_hidden_layers"], config["model_type"]
    if "layer_types" in config:
        return [name == "sliding_attention" for name in config["layer_types"]]
    if family in GEMMA:
        # Every second layer of Gemma 2 is full, and every sixth of Gemma 3.
        period = {"gemma2": 2, "gemma3_text": config.get("sliding_window_pattern", 6)}[family]
        return [layer_idx % period != period - 1 for layer_idx in range(num_layers)]
    if family == "mistral":
        return [config["sliding_window"] is not None] * num_layers
    if config.get("use_sliding_window"):
        return [layer_idx >= config["max_window_layers"] for layer_idx in range(num_layers)]
    return [False] * num_layers


class _Layer:
    """One decoder layer, with its weights looked up by their checkpoint names."""

    def __init__(
        self,
        config: dict[str, object],
        weights: dict[str, np.ndarray],
        prefix: str,
        is_sliding: bool,
    ) -> None:
        self.config, self.weights, self.prefix = config, weights, prefix
        self.is_sliding = is_sliding

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        return _rms_norm(self.config, x, self.weights[f"{self.prefix}.{name}.weight"])

    def project(self, name: str, x: np.ndarray) -> np.ndarray:
        out = x @ self.weights[f"{self.prefix}.{name}.weight"].T
        return out + self.weights.get(f"{self.prefix}.{name}.bias", 0.0)

    def attend(self, x: np.ndarray) -> np.ndarray:
        config, num_tokens, head_dim = self.config, len(x), self.config["head_dim"]
        q = self.project("self_attn.q_proj", x).reshape(num_tokens, -1, head_dim)
        k = self.project("self_attn.k_proj", x).reshape(num_tokens, -1, head_dim)
        v = self.project("self_attn.v_proj", x).reshape(num_tokens, -1, head_dim)
        if f"{self.prefix}.self_attn.q_norm.weight" in self.weights:
            q, k = self.norm("self_attn.q_norm", q), self.norm("self_attn.k_norm", k)
        angles, scale = _angles(_rope_of(config, self.is_sliding), num_tokens)
        q, k = _rotate(q, angles, scale), _rotate(k, angles, scale)
        num_q_per_kv = q.shape[1] // k.shape[1]
        distance = np.arange(num_tokens)[:, None] - np.arange(num_tokens)[None, :]
        is_hidden = distance < 0
        if self.is_sliding:
            # A window of 3 shows a token itself and the two before it.
            is_hidden |= distance >= config["sliding_window"]
        out = np.empty_like(q)
        for head_idx in range(q.shape[1]):
            kv_idx = head_idx // num_q_per_kv
            scores = q[:, head_idx] @ k[:, kv_idx].T
            scores = scores / math.sqrt(config.get("query_pre_attn_scalar", head_dim))
            scores = _soft_cap(scores, config.get("attn_logit_softcapping"))
            scores[is_hidden] = -np.inf
            probs = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, head_idx] = probs @ v[:, kv_idx] / probs.sum(axis=1, keepdims=True)
        return self.project("self_attn.o_proj", out.reshape(num_tokens, -1))

    def mlp(self, x: np.ndarray) -> np.ndarray:
        gate = self.project("mlp.gate_proj", x)
        if self.config["hidden_act"] == "gelu_pytorch_tanh":
            inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
            active = gate * (1 + np.tanh(inner)) / 2
        else:
            active = gate / (1 + np.exp(-gate))
        return self.project("mlp.down_proj", active * self.project("mlp.up_proj", x))


def _rms_norm(config: dict[str, object], x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    scale = 1 + weight if config["model_type"] in GEMMA else weight
    return scale * x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + config["rms_norm_eps"])


def _soft_cap(x: np.ndarray, cap: float | None) -> np.ndarray:
    return x if cap is None else cap * np.tanh(x / cap)


def _rotate(x: np.ndarray, angles: np.ndarray, scale: float) -> np.ndarray:
    # Dimension i and i + head_dim / 2 are the two parts of one complex number.
    real, imaginary = np.split(x, 2, axis=-1)
    turned = (real + 1j * imaginary) * scale * np.exp(1j * angles)[:, None, :]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def _rope_of(config: dict[str, object], is_sliding: bool) -> dict[str, object]:
    """The config as a layer's rotary embedding has it: Gemma 3's sliding layers have their own."""
    if config["model_type"] != "gemma3_text":
        return config
    if "rope_parameters" in config:
        rope = config["rope_parameters"]["sliding_attention" if is_sliding else "full_attention"]
        return config | {"rope_theta": rope["rope_theta"], "rope_scaling": rope}
    if is_sliding:
        return config | {"rope_theta": config["rope_local_base_freq"], "rope_scaling": None}
    return config


def _angles(
    config: dict[str, object], num_tokens: int
) -> tuple[np.ndarray, float]:  # f64[num_tokens, head_dim // 2]
    """Returns the angle of each position and dimension pair, and the factor of cos and sin."""
    rope, theta, dim = config["rope_scaling"] or {}, config["rope_theta"], config["head_dim"]
    kind, factor = rope.get("rope_type") or rope.get("type"), rope.get("factor")
    pair = np.arange(dim // 2)
    position = np.arange(num_tokens)[:, None]
    freq = theta ** (-2.0 * pair / dim)
    if kind in (None, "default"):
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
