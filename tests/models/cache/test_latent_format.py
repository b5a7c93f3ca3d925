"""The layout of pages of latents, and the memory of published models with them."""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from models.cache.attention_format import AttentionFormat
from models.cache.latent_format import LatentFormat
from models.decoder_spec import CacheRef, DecoderSpec, LayerSpec
from models.registry import read_config
from paxkv.config.cache_config import CacheConfig
from paxkv.errors import ConfigError
from paxkv.runner.memory.kv_cache_groups import groups_of_spec
from paxkv.runner.memory.memory_plan import DeviceMemory, plan_memory

FORMAT = LatentFormat.unpadded(latent_dim=512, rope_dim=64, dtype="bfloat16")


def test_every_device_stores_whole_latents():
    assert FORMAT.page_bytes(16) == FORMAT.on_each_of(4).page_bytes(16) == 16 * 576 * 2
    assert FORMAT.content_bytes(16) == 16 * 576 * 2


def test_vectors_are_widened_to_the_steps_of_a_platform():
    wide = FORMAT.with_width_step(128)
    assert (wide.width, wide.page_bytes(16), wide.content_bytes(16)) == (640, 20480, 18432)
    assert FORMAT.with_width_step(64) == FORMAT


@pytest.mark.parametrize(
    ("num_bytes_per_token", "width"), [(1152, 576), (1168, 584), (1150, None), (1154, None)]
)
def test_vectors_are_widened_to_the_pages_of_other_caches(num_bytes_per_token, width):
    """1,154 bytes would be rows of 577 numbers, which the GPU's copies cannot read."""
    wide = FORMAT.with_page_bytes(16 * num_bytes_per_token, 16)
    assert (wide and wide.width) == width


def test_a_view_has_the_tokens_of_a_block_in_order():
    narrow = LatentFormat.unpadded(latent_dim=2, rope_dim=1, dtype="float32")
    pages = jnp.arange(2 * 3 * 4 * 3.0).reshape(2, 3, 12)
    view = narrow.view(pages, block_size=4)
    assert view.shape == (2, 3, 1, 4, 3)
    assert view[1, 2, 0, 3].tolist() == [69, 70, 71]
    assert (narrow.unview(view, pages) == pages).all()


DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "max_position_embeddings": 163840,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}
KIMI_K2 = DEEPSEEK_V3 | {
    "vocab_size": 163840,
    "num_attention_heads": 64,
    "max_position_embeddings": 131072,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
}


@pytest.mark.parametrize("hf_config", [DEEPSEEK_V3, KIMI_K2], ids=["DeepSeek V3", "Kimi K2"])
@pytest.mark.parametrize(("dtype", "itemsize"), [("bfloat16", 2), ("float32", 4)])
def test_a_token_takes_one_latent_and_one_rotary_key_per_layer(hf_config, dtype, itemsize):
    groups = groups_of_spec(read_config(hf_config).spec(dtype), block_size=16)
    (group,) = groups.kv_cache_groups
    spec = group.kv_cache_spec
    assert len(group.layer_names) == 61
    assert spec.page_size_bytes == 16 * (512 + 64) * itemsize
    assert (spec.dtype, spec.head_size, groups.padded_shares) == (dtype, 576, {})


@pytest.mark.parametrize(
    ("hf_config", "max_model_len", "num_longest"),
    [(DEEPSEEK_V3, 163840, 3), (KIMI_K2, 131072, 4)],
    ids=["DeepSeek V3", "Kimi K2"],
)
def test_memory_plan_counts_the_bytes_of_latents(hf_config, max_model_len, num_longest):
    """61 layers x (512 + 64) numbers x 2 bytes = 70,272 bytes per token."""
    memory = DeviceMemory(
        total_bytes=40 * 2**30, limit_bytes=40 * 2**30, used_bytes=0, activation_bytes=0
    )
    plan = plan_memory(
        groups_of_spec(read_config(hf_config).spec("bfloat16"), block_size=64),
        CacheConfig(gpu_memory_utilization=0.9),
        max_model_len=max_model_len,
        max_num_batched_tokens=2048,
        max_num_seqs=64,
        memory=memory,
    )
    assert plan.token_bytes == plan.late_token_bytes == 70_272
    assert plan.block_bytes == 64 * 70_272
    # 36 GiB, rounded down to 7 binary digits of the number of blocks: 8,594 -> 8,576.
    assert plan.kv_cache_config.num_blocks == 8_576
    assert plan.num_tokens == 8_575 * 64
    assert plan.num_longest_reqs == num_longest
    assert "(bfloat16 latents, 70272 bytes per token, " in plan.report()


def test_padding_on_a_tpu_is_reported():
    groups = groups_of_spec(
        read_config(DEEPSEEK_V3).spec("bfloat16"), block_size=16, head_dim_step=128
    )
    # 576 numbers are widened to 640.
    assert list(groups.padded_shares.values()) == pytest.approx([0.1] * 61)


def test_layers_with_latents_keep_them_when_windows_keep_all_tokens():
    config = read_config(DEEPSEEK_V3)
    assert replace(config, has_unified_kv=True).spec("float32") == config.spec("float32")


def test_pages_that_no_width_of_a_tpu_fills_are_refused_before_anything_is_compiled():
    keys = AttentionFormat(num_kv_heads=3, head_dim=128, dtype="bfloat16")
    latents = LatentFormat.unpadded(latent_dim=448, rope_dim=64, dtype="bfloat16")
    caches = (("kv", CacheRef(format=keys)), ("latent", CacheRef(format=latents)))
    spec = DecoderSpec(layers=(LayerSpec(name="layers.0", caches=caches),))
    with pytest.raises(ConfigError, match=r"layers\.0\.latent"):
        groups_of_spec(spec, block_size=16, head_dim_step=512)
