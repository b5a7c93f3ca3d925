"""The layout of pages of index keys, in a pool with latents."""

from dataclasses import replace

import pytest

from models.cache.index_format import IndexFormat
from models.registry import read_config
from paxkv.runner.memory.kv_cache_groups import groups_of_spec

FORMAT = IndexFormat.unpadded(key_dim=128, dtype="bfloat16")
DEEPSEEK_V32 = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "max_position_embeddings": 163840,
}


@pytest.mark.parametrize(("num_bytes", "width"), [(256, 128), (288, 144), (260, None), (254, None)])
def test_keys_are_widened_to_the_pages_of_other_caches(num_bytes, width):
    wide = FORMAT.with_page_bytes(64 * num_bytes, 64)
    assert (wide and wide.width) == width
    assert FORMAT.with_width_step(128) == replace(FORMAT, width_step=128)
    assert FORMAT.with_width_step(128).with_page_bytes(64 * 288, 64) is None


@pytest.mark.parametrize(
    ("head_dim_step", "block_size", "width", "padded_share"),
    # Keys of 64 tokens fill a page of latents almost. On a TPU, which stores latents of 640
    # numbers, rows of 160 numbers would have to be laid out anew.
    [(1, 64, 144, 1 / 9), (128, 16, 640, 0.8)],
)
def test_index_keys_have_blocks_that_fill_a_page_of_latents(
    head_dim_step, block_size, width, padded_share
):
    spec = read_config(DEEPSEEK_V32).spec("bfloat16")
    groups = groups_of_spec(spec, block_size=16, head_dim_step=head_dim_step)
    names = ["model.layers.60.self_attn", "model.layers.60.self_attn.indexer"]
    latents, keys = (
        next(g.kv_cache_spec for g in groups.kv_cache_groups if name in g.layer_names)
        for name in names
    )
    assert sum(len(group.layer_names) for group in groups.kv_cache_groups) == 2 * 61
    assert (latents.block_size, keys.block_size) == (16, block_size)
    assert keys.page_size_bytes == latents.page_size_bytes
    name = names[1]
    assert groups.formats[name].width == width
    assert groups.padded_shares[name] == pytest.approx(padded_share)
