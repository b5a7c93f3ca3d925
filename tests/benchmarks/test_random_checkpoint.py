"""Random checkpoints are seeded, and both libraries read the same model from them."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from benchmarks.random_checkpoint import MODEL_SHAPES, write_checkpoint
from models import load_model

TINY = MODEL_SHAPES["tiny"]


def test_seed_decides_the_weights(tmp_path) -> None:
    first, same, other = (
        load_file(write_checkpoint(tmp_path / str(i), TINY, seed=seed) / "model.safetensors")
        for i, seed in enumerate((5, 5, 6))
    )
    name = "model.layers.1.mlp.down_proj.weight"
    np.testing.assert_array_equal(first[name], same[name])
    assert not np.array_equal(first[name], other[name])


def test_paxkv_loads_it(tmp_path) -> None:
    config = load_model(write_checkpoint(tmp_path, TINY)).config
    assert (config.architecture, config.tie_word_embeddings) == ("Qwen3ForCausalLM", True)
    assert (config.hidden_size, config.num_layers, config.head_dim) == (64, 2, 16)
    assert (config.num_q_heads, config.num_kv_heads, config.vocab_size) == (4, 2, 256)


@pytest.mark.parametrize(
    ("name", "num_weights"),
    # Embedding, layers (attention, MLP, norms), last norm; by hand from the shapes.
    [
        ("small", 16_384 * 512 + 8 * (1536 * 512 + 3 * 1536 * 512 + 2 * 512 + 2 * 64) + 512),
        (
            "mid",
            32_768 * 1024 + 28 * (6 * 1024 * 1024 + 3 * 3072 * 1024 + 2 * 1024 + 2 * 128) + 1024,
        ),
    ],
)
def test_shapes_have_the_wanted_size(name: str, num_weights: int) -> None:
    assert MODEL_SHAPES[name].num_weights == num_weights


def test_best_token_is_clearly_the_best(tmp_path) -> None:
    """Greedy tokens of engines that round differently agree, as far as luck goes."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        write_checkpoint(tmp_path, TINY), dtype=torch.float32
    )
    token_ids = torch.arange(96).reshape(2, 48)
    with torch.inference_mode():
        logits = model(token_ids).logits.reshape(-1, TINY.vocab_size)
    best = logits.topk(2).values
    assert 0.5 < logits.std() < 2
    assert (best[:, 0] - best[:, 1]).median() > 0.1
