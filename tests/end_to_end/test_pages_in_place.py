"""No program of an engine copies the KV cache, compiled with the options that users compile with.

The suite's own options leave copies in that these take out, so nothing else shows it.
"""

import json

import jax
import pytest

from models import LoadedModel, load_model
from paxkv.runner.memory.device_mesh import device_mesh
from paxkv.runner.memory.kv_cache_arrays import abstract_kv_cache
from paxkv.runner.memory.kv_cache_groups import groups_of_spec
from paxkv.runner.programs.warmup import StepPrograms
from paxkv.runner.shapes.bucket_sizes import SAMPLED_CHUNK_ROWS
from paxkv.runner.shapes.step_buckets import StepBuckets
from tests.models.steppers import checkpoint_folder

CACHE_BYTES = 256 * 2**20
MAX_MODEL_LEN = 256
_LATENTS = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "max_position_embeddings": MAX_MODEL_LEN, "q_lora_rank": 16},
    **{"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 8},
    **{"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 16, "first_k_dense_replace": 1},
}
_INDEX = {"index_topk": 16, "index_head_dim": 16, "index_n_heads": 16}
_HYBRID = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    "max_position_embeddings": MAX_MODEL_LEN,
}
# Models whose weights do not matter, by the name of their family: a config.json.
CONFIGS = {
    "deepseek-v3": {"architectures": ["DeepseekV3ForCausalLM"], **_LATENTS},
    "deepseek-v3.2": {"architectures": ["DeepseekV32ForCausalLM"], **_LATENTS, **_INDEX},
    # The second layer writes index keys, and then reads the latents of the first layer.
    "mistral-large4": {
        **{"architectures": ["MistralLarge4ForCausalLM"], **_LATENTS, **_INDEX},
        **{"no_rope_layers": [1, 1, 0], "kv_source_layers": [0, 0, 2]},
    },
    # A layer writes keys, values and two vectors of its index, and reads the index in between.
    "qwen4-exp": {
        **{"architectures": ["Qwen4ExpForCausalLM"], "vocab_size": 64, "hidden_size": 32},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16},
        **{"layer_types": ["indexed_attention"] * 2, "max_position_embeddings": MAX_MODEL_LEN},
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        **{"shared_expert_intermediate_size": 16, "hc_count": 2, "hc_lowrank": 8},
        **{"indexer_n_heads": 2, "indexer_head_dim": 16, "indexer_budget": 16},
        "indexer_compress_ratio": 4,
    },
    # Their slots have three parts of several pages.
    "qwen3-next": {
        **{"architectures": ["Qwen3NextForCausalLM"], **_HYBRID},
        **{"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64},
        **{"linear_value_head_dim": 64, "linear_conv_kernel_dim": 4, "num_experts": 4},
        **{"num_experts_per_tok": 2, "moe_intermediate_size": 16},
        "shared_expert_intermediate_size": 16,
    },
    "bamba": {
        **{"architectures": ["BambaForCausalLM"], **_HYBRID, "attn_layer_indices": [2]},
        **{"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 1},
        **{"mamba_d_conv": 4, "mamba_expand": 16},
    },
    "kimi-linear": {
        **{"architectures": ["KimiLinearForCausalLM"], **_LATENTS, "num_hidden_layers": 4},
        **{"num_key_value_heads": 4, "q_lora_rank": None, "num_experts": 4},
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        **{"linear_num_heads": 8, "linear_head_dim": 64, "linear_conv_kernel_dim": 4},
    },
}


def load_family(name, folder) -> LoadedModel:
    if name not in CONFIGS:
        return load_model(checkpoint_folder(name), dtype="float32")
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    return load_model(folder, dtype="float32", load_format="dummy")


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma3", *CONFIGS])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_temporary_memory_is_far_below_the_cache(tmp_path, family, kv_dtype, batch_invariant):
    model = load_family(family, tmp_path)
    mesh = device_mesh(jax.devices()[0])
    spec = model.config.spec(kv_dtype)
    groups = groups_of_spec(spec, block_size=64)
    model = model.with_places(groups.places(spec))
    config = groups.config(2)
    num_blocks = CACHE_BYTES // (
        config.num_rows * groups.kv_cache_groups[0].kv_cache_spec.page_size_bytes
    )
    pages = abstract_kv_cache(groups.config(num_blocks), mesh, model.platform, kv_dtype)
    buckets = StepBuckets(
        max_num_batched_tokens=128,
        max_num_seqs=16,
        max_decode_burst=4,
        tables=groups.tables(MAX_MODEL_LEN),
        max_model_len=MAX_MODEL_LEN,
        sampled_chunk_rows=SAMPLED_CHUNK_ROWS,
        shares_programs=True,
        batch_invariant=batch_invariant,
    )
    programs = StepPrograms(
        model=model, params=model.params, buckets=buckets, max_num_seqs=16, mesh=mesh
    )
    for shape in buckets.largest_first:
        memory = programs.compile(shape, pages).memory_analysis()
        print(f"{family} {kv_dtype}: {memory.temp_size_in_bytes / 2**20:.1f} MiB for {shape}")
        assert memory.temp_size_in_bytes < CACHE_BYTES / 10
