"""Writes random checkpoints in Hugging Face layout, from NumPy and a seed alone.

A checkpoint is a Qwen3, dense or with experts, a DeepSeek V3 (`latent_shape.py`), or a Qwen3.5 or
Bamba (`hybrid_shape.py`).

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
from benchmarks.hybrid_shape import HybridShape
from benchmarks.latent_shape import LatentShape

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

    def config_fields(self) -> dict[str, object]:
        """The fields of config.json that describe the shape."""
        fields = {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_q_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rope_theta": 1_000_000.0,
            "tie_word_embeddings": True,
        }
        if self.num_experts:
            fields |= {
                "architectures": ["Qwen3MoeForCausalLM"],
                "model_type": "qwen3_moe",
                "num_experts": self.num_experts,
                "num_experts_per_tok": self.num_experts_per_tok,
                "moe_intermediate_size": self.intermediate_size,
                "norm_topk_prob": True,
            }
        return fields

    def weight_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every weight, in a fixed order; matrices are [out, in]."""
        hidden = self.hidden_size
        q_width, kv_width = self.num_q_heads * self.head_dim, self.num_kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab_size, hidden)
        for layer_idx in range(self.num_layers):
            for name, weight_shape in (
                ("input_layernorm", (hidden,)),
                ("self_attn.q_proj", (q_width, hidden)),
                ("self_attn.k_proj", (kv_width, hidden)),
                ("self_attn.v_proj", (kv_width, hidden)),
                ("self_attn.q_norm", (self.head_dim,)),
                ("self_attn.k_norm", (self.head_dim,)),
                ("self_attn.o_proj", (hidden, q_width)),
                ("post_attention_layernorm", (hidden,)),
                *self._mlp_weight_shapes(),
            ):
                yield f"model.layers.{layer_idx}.{name}.weight", weight_shape
        yield "model.norm.weight", (hidden,)

    def _mlp_weight_shapes(self) -> Iterator[tuple[str, tuple[int, int]]]:
        hidden, inner = self.hidden_size, self.intermediate_size
        owners = ["mlp"]
        if self.num_experts:
            yield "mlp.gate", (self.num_experts, hidden)
            owners = [f"mlp.experts.{expert}" for expert in range(self.num_experts)]
        for owner in owners:
            yield f"{owner}.gate_proj", (inner, hidden)
            yield f"{owner}.up_proj", (inner, hidden)
            yield f"{owner}.down_proj", (hidden, inner)


AnyShape = ModelShape | LatentShape | HybridShape

MODEL_SHAPES: dict[str, AnyShape] = {
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
    # Multiplies each token with as many weights as "small" does.
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
    # "small-moe" with latent attention, a shared expert, and no experts in the first layer.
    "small-latent": LatentShape(
        hidden_size=512,
        num_layers=8,
        num_heads=8,
        q_lora_rank=192,
        kv_lora_rank=128,
        nope_head_dim=64,
        rope_head_dim=32,
        v_head_dim=64,
        intermediate_size=1536,
        moe_intermediate_size=384,
        num_experts=16,
        n_group=4,
        num_experts_per_tok=4,
        vocab_size=16_384,
    ),
    # Each multiplies a token with as many weights as "small" does, within 7 %.
    "small-gdn": HybridShape(
        hidden_size=512,
        num_layers=8,
        num_q_heads=8,
        num_kv_heads=4,
        head_dim=64,
        intermediate_size=1536,
        vocab_size=16_384,
        is_mamba2=False,
        num_state_heads=8,
        state_head_dim=64,
        state_key_dim=64,
    ),
    "small-mamba2": HybridShape(
        hidden_size=512,
        num_layers=8,
        num_q_heads=8,
        num_kv_heads=4,
        head_dim=64,
        intermediate_size=1280,
        vocab_size=16_384,
        is_mamba2=True,
        num_state_heads=16,
        state_head_dim=64,
        state_key_dim=64,
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
    folder: Path, shape: AnyShape, *, seed: int = 0, dtype: str = "float32"
) -> Path:
    """Writes config.json and model.safetensors into `folder`, which is created if missing.

    The same arguments always give the same weights.

    Args:
        dtype: A key of `NUMPY_DTYPES`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = shape.config_fields() | {
        "max_position_embeddings": MAX_POSITION_EMBEDDINGS,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "hidden_act": "silu",
        "torch_dtype": dtype,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    # RandomState always draws the same numbers; default_rng may change with NumPy.
    rng = np.random.RandomState(seed)
    weights = {
        name: _draw(rng, name, weight_shape).astype(NUMPY_DTYPES[dtype])
        for name, weight_shape in shape.weight_shapes()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _draw(rng: np.random.RandomState, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if "norm" in name or name.endswith(".D"):
        return np.ones(shape)
    # A state forgets a token after about 1 to 1,000 further tokens.
    if name.endswith("A_log"):
        return np.log(rng.uniform(1, 16, shape))
    if name.endswith("dt_bias"):
        return np.log(np.expm1(np.exp(rng.uniform(np.log(0.001), np.log(0.1), shape))))
    if "bias" in name:
        return 0.1 * rng.standard_normal(shape)
    num_in = shape[-1]
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
