"""Writes random Qwen3 checkpoints in Hugging Face layout, from NumPy and a seed alone.

A checkpoint is dense, or has experts.

Weights are normal with a width that keeps the variance of a product equal to that of its input.
Logits then spread by about 1, the best two differ by about 0.2, and the next token depends on all
preceding tokens. Engines that agree to float32 rounding therefore choose the same tokens, except in
at most one of about ten thousand tokens.

    python -m benchmarks.random_checkpoint --model small --out FOLDER
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from benchmarks.command_line import output_folder, run_benchmark, seed_number

MAX_POSITION_EMBEDDINGS = 2048
NUMPY_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A Qwen3 with a tied vocabulary head.

    Args:
        intermediate_size: Inside an MLP, or inside one expert.
        num_experts: In every layer; 0 is a dense model.
        num_experts_per_tok: Experts that a token goes to.
    """

    hidden_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    num_experts: int = 0
    num_experts_per_tok: int = 0


MODEL_SHAPES = {
    "tiny": ModelShape(
        hidden_size=64,
        num_layers=2,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=96,
        vocab_size=256,
    ),
    "small": ModelShape(
        hidden_size=512,
        num_layers=8,
        num_q_heads=8,
        num_kv_heads=4,
        head_dim=64,
        intermediate_size=1536,
        vocab_size=16_384,
    ),
    # A token is multiplied with as many weights as in "small".
    "small-moe": ModelShape(
        hidden_size=512,
        num_layers=8,
        num_q_heads=8,
        num_kv_heads=4,
        head_dim=64,
        intermediate_size=384,
        vocab_size=16_384,
        num_experts=16,
        num_experts_per_tok=4,
    ),
    "mid": ModelShape(
        hidden_size=1024,
        num_layers=28,
        num_q_heads=16,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=3072,
        vocab_size=32_768,
    ),
}


def write_checkpoint(
    folder: Path, shape: ModelShape, *, seed: int = 0, dtype: str = "float32"
) -> Path:
    """Writes config.json and model.safetensors into `folder`, which is created if missing.

    The same arguments always give the same weights.

    Args:
        dtype: A key of `NUMPY_DTYPES`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_q_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": MAX_POSITION_EMBEDDINGS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "hidden_act": "silu",
        "torch_dtype": dtype,
    }
    if shape.num_experts:
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": shape.num_experts,
            "num_experts_per_tok": shape.num_experts_per_tok,
            "moe_intermediate_size": shape.intermediate_size,
            "norm_topk_prob": True,
        }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    # RandomState always draws the same numbers; default_rng may change with NumPy.
    rng = np.random.RandomState(seed)
    weights = {
        name: _draw(rng, name, weight_shape).astype(NUMPY_DTYPES[dtype])
        for name, weight_shape in _weight_shapes(shape)
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _weight_shapes(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every weight, in a fixed order; matrices are [out, in]."""
    hidden = shape.hidden_size
    q_width, kv_width = shape.num_q_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", (shape.vocab_size, hidden)
    for layer_idx in range(shape.num_layers):
        for name, weight_shape in (
            ("input_layernorm", (hidden,)),
            ("self_attn.q_proj", (q_width, hidden)),
            ("self_attn.k_proj", (kv_width, hidden)),
            ("self_attn.v_proj", (kv_width, hidden)),
            ("self_attn.q_norm", (shape.head_dim,)),
            ("self_attn.k_norm", (shape.head_dim,)),
            ("self_attn.o_proj", (hidden, q_width)),
            ("post_attention_layernorm", (hidden,)),
            *_mlp_weight_shapes(shape),
        ):
            yield f"model.layers.{layer_idx}.{name}.weight", weight_shape
    yield "model.norm.weight", (hidden,)


def _mlp_weight_shapes(shape: ModelShape) -> Iterator[tuple[str, tuple[int, int]]]:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    owners = ["mlp"]
    if shape.num_experts:
        yield "mlp.gate", (shape.num_experts, hidden)
        owners = [f"mlp.experts.{expert}" for expert in range(shape.num_experts)]
    for owner in owners:
        yield f"{owner}.gate_proj", (inner, hidden)
        yield f"{owner}.up_proj", (inner, hidden)
        yield f"{owner}.down_proj", (hidden, inner)


def _draw(rng: np.random.RandomState, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if "norm" in name:
        return np.ones(shape)
    num_in = shape[1]
    return num_in**-0.5 * rng.standard_normal(shape)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.random_checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", choices=sorted(MODEL_SHAPES), required=True)
    parser.add_argument("--out", type=output_folder, required=True, help="folder to write into")
    parser.add_argument("--seed", type=seed_number, default=0)
    parser.add_argument("--dtype", choices=sorted(NUMPY_DTYPES), default="float32")
    arguments = parser.parse_args()
    shape = MODEL_SHAPES[arguments.model]
    write_checkpoint(arguments.out, shape, seed=arguments.seed, dtype=arguments.dtype)
    num_bytes = (arguments.out / "model.safetensors").stat().st_size
    print(f"{arguments.out}: {num_bytes / 2**20:.0f} MiB of weights")


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
