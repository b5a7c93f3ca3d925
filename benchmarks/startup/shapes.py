"""Random checkpoints in the exact shapes of small published models.

    python -m benchmarks.startup.shapes --shape qwen3-0.6b --out FOLDER

Each checkpoint is bfloat16 and has no tokenizer. Its config.json has the published sizes, so the
same programs are compiled as for the published model. Its answers have no meaning.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from benchmarks.command_line import output_folder, run_benchmark, seed_number

_COMMON = {"attention_bias": False, "tie_word_embeddings": True, "torch_dtype": "bfloat16"}
SHAPES: Mapping[str, Mapping[str, object]] = {
    "qwen3-0.6b": _COMMON
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
    },
    "gemma-3-1b": _COMMON
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": 262_144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
    "llama-3.2-1b": _COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
}
# Weights are drawn from this many normal numbers. A billion weights then take seconds; drawing
# each from a normal distribution takes much longer.
_NUM_DRAWN = 2**16


def write_shape(
    folder: Path, name: str, *, seed: int = 0, max_shard_bytes: int | None = None
) -> Path:
    """Writes config.json and the weights of a key of `SHAPES` into `folder`.

    Args:
        max_shard_bytes: Of the weights in one file. A larger weight gets a file of its own. None
            writes one file, model.safetensors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = SHAPES[name]
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    rng = np.random.default_rng(seed)
    values_np = rng.standard_normal(_NUM_DRAWN, dtype=np.float32)
    shapes = dict(weight_shapes(config))
    shards = _split(shapes, max_shard_bytes)
    files = {}
    for shard_idx, names in enumerate(shards):
        file_name = "model.safetensors"
        if max_shard_bytes is not None:
            file_name = f"model-{shard_idx + 1:05}-of-{len(shards):05}.safetensors"
        files |= dict.fromkeys(names, file_name)
        # Tensors are written one by one, because some machines cannot hold a whole file in memory.
        with (folder / file_name).open("wb") as file:
            file.write(_header({weight_name: shapes[weight_name] for weight_name in names}))
            for weight_name in names:
                drawn_np = _draw(rng, values_np, config, weight_name, shapes[weight_name])
                file.write(drawn_np.tobytes())
    if max_shard_bytes is not None:
        index = {"metadata": {}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _split(shapes: Mapping[str, tuple[int, ...]], max_shard_bytes: int | None) -> list[list[str]]:
    """The names of the weights in each file."""
    shards: list[list[str]] = []
    num_bytes = 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        if not shards or (max_shard_bytes is not None and num_bytes + size > max_shard_bytes):
            shards.append([])
            num_bytes = 0
        shards[-1].append(name)
        num_bytes += size
    return shards


def weight_shapes(config: Mapping[str, object]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every weight; matrices are [out, in]."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q_width = config["num_attention_heads"] * config["head_dim"]
    kv_width = config["num_key_value_heads"] * config["head_dim"]
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config["model_type"] == "gemma3_text":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    of_layer = {
        **{norm: (hidden,) for norm in norms},
        "self_attn.q_proj": (q_width, hidden),
        "self_attn.k_proj": (kv_width, hidden),
        "self_attn.v_proj": (kv_width, hidden),
        "self_attn.o_proj": (hidden, q_width),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    if config["model_type"] in ("qwen3", "gemma3_text"):
        of_layer |= {f"self_attn.{part}_norm": (config["head_dim"],) for part in "qk"}
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer_idx in range(config["num_hidden_layers"]):
        for part, shape in of_layer.items():
            yield f"model.layers.{layer_idx}.{part}.weight", shape
    yield "model.norm.weight", (hidden,)


def _header(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    """The header of a safetensors file whose tensors follow in this order."""
    tensors: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        tensors[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(tensors).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _draw(
    rng: np.random.Generator,
    values_np: np.ndarray,  # f32[num_drawn]
    config: Mapping[str, object],
    name: str,
    shape: tuple[int, ...],
) -> np.ndarray:
    if "norm" in name:
        # A Gemma multiplies by 1 plus the weight.
        return np.full(shape, config["model_type"] != "gemma3_text", ml_dtypes.bfloat16)
    scaled_np = (values_np * shape[1] ** -0.5).astype(ml_dtypes.bfloat16)
    return scaled_np[rng.integers(0, _NUM_DRAWN, shape, np.uint16)]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.startup.shapes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--out", type=output_folder, required=True, help="folder to write into")
    parser.add_argument("--seed", type=seed_number, default=0)
    arguments = parser.parse_args()
    write_shape(arguments.out, arguments.shape, seed=arguments.seed)
    num_bytes = (arguments.out / "model.safetensors").stat().st_size
    print(f"{arguments.out}: {num_bytes / 2**20:.0f} MiB of weights")


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
