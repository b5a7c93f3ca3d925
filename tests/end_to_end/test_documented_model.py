"""The model in docs/guide/adding-a-model.md has the logits of the same model in plain NumPy."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from models import load_model
from models.decoders.chosen_layer import kind_of
from tests.end_to_end.doc_examples import page_examples
from tests.oracles.paged_stepper import PagedStepper

PAGE = "docs/guide/adding-a-model.md"
TOKENS = [5, 130, 7, 7, 80, 3, 401, 12, 9, 100, 2, 45]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The files of the page, and a random checkpoint with the names that the page describes."""
    folder = tmp_path_factory.mktemp("documented")
    for example in page_examples(PAGE):
        if example.kind == "file" and example.file_name.startswith("my_"):
            path = folder / example.file_name
            path.parent.mkdir(exist_ok=True)
            path.write_text(example.text)
    save_file(random_weights(read_config(folder)), folder / "my_checkpoint/model.safetensors")
    return folder


@pytest.fixture(autouse=True)
def clean_imports(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("my_model", None)


def read_config(folder: Path) -> dict[str, object]:
    return json.loads((folder / "my_checkpoint/config.json").read_text())


def random_weights(config: dict[str, object]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    hidden, inner, vocab = (
        config[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
    )
    kv_width = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {"model.embed_tokens": (vocab, hidden), "lm_head": (vocab, hidden)}
    norms = ["model.norm"]
    for idx in range(config["num_hidden_layers"]):
        layer = f"model.layers.{idx}"
        for name, shape in {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv_width, hidden),
            "self_attn.v_proj": (kv_width, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }.items():
            shapes[f"{layer}.{name}"] = shape
        norms += [f"{layer}.attn_norm", f"{layer}.mlp_norm"]
    weights = {f"{name}.weight": 0.15 * rng.normal(size=shape) for name, shape in shapes.items()}
    for name in norms:
        weights[f"{name}.weight"] = 1 + 0.2 * rng.normal(size=hidden)
        weights[f"{name}.bias"] = 0.2 * rng.normal(size=hidden)
    return {name: array.astype(np.float32) for name, array in weights.items()}


def dense_logits(
    config: dict[str, object], weights: dict[str, np.ndarray], tokens: list[int]
) -> np.ndarray:  # f64[num_tokens, vocab]
    """The model of the page without a cache, in float64. It shares no code with `models`."""
    weights = {name: array.astype(np.float64) for name, array in weights.items()}

    def norm(name: str, x: np.ndarray) -> np.ndarray:
        centered = x - x.mean(axis=-1, keepdims=True)
        deviation = np.sqrt(x.var(axis=-1, keepdims=True) + config["norm_eps"])
        return centered / deviation * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def product(name: str, x: np.ndarray) -> np.ndarray:
        return x @ weights[f"{name}.weight"].T

    num_heads = config["num_attention_heads"]
    head_dim = config["hidden_size"] // num_heads
    half = head_dim // 2
    angles = np.arange(len(tokens))[:, None] * config["rope_theta"] ** (-np.arange(half) / half)

    def heads(name: str, x: np.ndarray, *, turns: bool) -> np.ndarray:
        """f64[num_heads, num_tokens, head_dim], turned to their positions."""
        y = product(name, x).reshape(len(tokens), -1, head_dim).transpose(1, 0, 2)
        if not turns:
            return y
        first, second = y[..., :half], y[..., half:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def attend(layer: str, x: np.ndarray) -> np.ndarray:
        q = heads(f"{layer}.q_proj", x, turns=True)
        groups = num_heads // config["num_key_value_heads"]
        k = heads(f"{layer}.k_proj", x, turns=True).repeat(groups, axis=0)
        v = heads(f"{layer}.v_proj", x, turns=False).repeat(groups, axis=0)
        scores = q @ k.transpose(0, 2, 1) / np.sqrt(head_dim)
        scores = np.where(np.tri(len(tokens), dtype=bool), scores, -np.inf)
        probs = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out = probs / probs.sum(axis=-1, keepdims=True) @ v
        return product(f"{layer}.o_proj", out.transpose(1, 0, 2).reshape(len(tokens), -1))

    x = weights["model.embed_tokens.weight"][tokens]
    for idx in range(config["num_hidden_layers"]):
        layer = f"model.layers.{idx}"
        x = norm(f"{layer}.attn_norm", x + attend(f"{layer}.self_attn", x))
        inner = np.maximum(product(f"{layer}.mlp.up_proj", x), 0) ** 2
        x = norm(f"{layer}.mlp_norm", x + product(f"{layer}.mlp.down_proj", inner))
    return product("lm_head", norm("model.norm", x))


def test_logits_equal_numpy_in_chunks_and_decodes(folder, monkeypatch):
    monkeypatch.chdir(folder)
    loaded = load_model("my_checkpoint", model_impl="my_model:MyModel", dtype="float32")
    assert loaded.class_name == "my_model.MyModel"
    stepper = PagedStepper(loaded)
    # Two chunks of the prompt, and two decodes.
    chunks = [TOKENS[:7], TOKENS[7:10], TOKENS[10:11], TOKENS[11:]]
    got = np.concatenate([stepper.step({1: chunk})[1] for chunk in chunks])
    wanted = dense_logits(read_config(folder), random_weights(read_config(folder)), TOKENS)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())


def test_a_cpu_compiles_its_layers_once(folder, monkeypatch):
    monkeypatch.chdir(folder)
    loaded = load_model("my_checkpoint", model_impl="./my_model.py:MyModel", load_format="dummy")
    layers = loaded._merge(loaded.params).layers
    assert len({kind_of(layer) for layer in layers}) == 1


def test_the_file_is_about_sixty_lines():
    """The page promises a short model."""
    (code,) = [e.text for e in page_examples(PAGE) if e.file_name == "my_model.py"]
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 65
