"""Writes golden/ from transformers (needs torch): `python -m tests.oracles.make_golden`."""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.oracles.golden import GOLDEN_FOLDER, LOGITS_FILE, ROPE_FILE, golden_positions
from tests.oracles.recipes import NUM_GREEDY_TOKENS, PROMPT_LENGTHS, RECIPES, write_recipe

# A greedy step may not be a near tie, or rounding would decide it: the top two logits are further
# apart than this share of the largest.
MIN_RELATIVE_GAP = 1e-3

ROPE_HEAD_DIM = 64
# Name -> config.json fields, and for which sequence lengths frequencies are wanted (None: any).
ROPE_CASES: dict[str, tuple[dict[str, object], tuple[int | None, ...]]] = {
    "default": ({"rope_theta": 500000.0}, (None,)),
    "linear": ({"rope_scaling": {"type": "linear", "factor": 2.5}}, (None,)),
    "dynamic": (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 64},
        (10, 64, 65, 200),
    ),
    "llama3": (
        {
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
        (None,),
    ),
    "yarn": (
        {
            "rope_theta": 1e6,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
            },
        },
        (None,),
    ),
    "yarn_mscale": (
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 24.0,
                "beta_slow": 2.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
                "truncate": False,
            },
        },
        (None,),
    ),
    "yarn_attention_factor": (
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 64.0,
                "original_max_position_embeddings": 2048,
                "attention_factor": 1.5,
            },
        },
        (None,),
    ),
}


def load_hf_model(folder: Path) -> torch.nn.Module:
    """Loads a checkpoint for exact comparison: float32, attention without fused kernels."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


@torch.no_grad()
def hf_greedy(
    model: torch.nn.Module, prompt: list[int], num_new_tokens: int
) -> tuple[list[int], np.ndarray]:  # f32[len(prompt) + num_new_tokens - 1, vocab]
    """Generates greedily with a cache; returns the new tokens and the logits of every position."""
    new_tokens: list[int] = []
    logits: list[np.ndarray] = []
    past, input_ids = None, prompt
    for _ in range(num_new_tokens):
        output = model(torch.tensor([input_ids]), past_key_values=past, use_cache=True)
        past = output.past_key_values
        logits.extend(output.logits[0].numpy())
        new_tokens.append(int(np.argmax(logits[-1])))
        input_ids = new_tokens[-1:]
    return new_tokens, np.stack(logits)


def main() -> None:
    GOLDEN_FOLDER.mkdir(exist_ok=True)
    arrays: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in RECIPES:
            model = load_hf_model(write_recipe(Path(folder) / name, name))
            arrays |= _golden_sequences(name, model)
    np.savez_compressed(LOGITS_FILE, **arrays)
    ROPE_FILE.write_text(json.dumps(_golden_rope(), indent=1), encoding="utf-8")
    print(f"{LOGITS_FILE.stat().st_size:,} + {ROPE_FILE.stat().st_size:,} bytes")


def _golden_sequences(name: str, model: torch.nn.Module) -> dict[str, np.ndarray]:
    rng = np.random.RandomState(len(name))
    arrays: dict[str, np.ndarray] = {}
    for prompt_idx, length in enumerate(PROMPT_LENGTHS):
        while True:
            prompt = rng.randint(3, model.config.vocab_size, length).tolist()
            new_tokens, logits = hf_greedy(model, prompt, NUM_GREEDY_TOKENS)
            top_two = np.sort(logits[length - 1 :], axis=-1)[:, -2:]
            if np.all(top_two[:, 1] - top_two[:, 0] > MIN_RELATIVE_GAP * np.abs(logits).max()):
                break
        key = f"{name}/{prompt_idx}"
        arrays[f"{key}/prompt"] = np.array(prompt, np.int32)
        arrays[f"{key}/new_tokens"] = np.array(new_tokens, np.int32)
        arrays[f"{key}/logits"] = logits[golden_positions(length)]
    return arrays


def _golden_rope() -> dict[str, object]:
    cases: dict[str, object] = {}
    for name, (fields, seq_lens) in ROPE_CASES.items():
        hf_fields = {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 8,
            "hidden_size": 2 * ROPE_HEAD_DIM,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "max_position_embeddings": 131072,
        } | fields
        frequencies = []
        for seq_len in seq_lens:
            rotary = LlamaRotaryEmbedding(transformers.LlamaConfig(**hf_fields))
            if seq_len is not None:
                rotary(torch.zeros(1), torch.arange(seq_len)[None])
            frequencies.append(
                {
                    "seq_len": seq_len,
                    "inv_freq": rotary.inv_freq.tolist(),
                    "cos_sin_scale": float(rotary.attention_scaling),
                }
            )
        cases[name] = {"hf_config": hf_fields, "frequencies": frequencies}
    return cases


if __name__ == "__main__":
    main()
