"""Models that no test could load: abstract weights in the shapes of published checkpoints."""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from models import LoadedModel
from models.loading.kernel_encoder import KernelEncoder, Quantization
from models.loading.loaded_module import flatten_state
from models.loading.module_structure import ModuleStructure, splits_inputs
from models.platforms import Platform
from models.registry import family_class, read_config
from models.stored_kernels.stored_kernel import StoredKernel

_LLAMA_3_1_70B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 8_192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8_192,
    "eos_token_id": 128_001,
}
_QWEN3_235B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 151_936,
    "hidden_size": 4_096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1_536,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 8_192,
    "eos_token_id": 151_645,
}
_GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 201_088,
    "hidden_size": 2_880,
    "intermediate_size": 2_880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "max_position_embeddings": 8_192,
    "tie_word_embeddings": False,
    "eos_token_id": 200_002,
}
_DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129_280,
    "hidden_size": 7_168,
    "intermediate_size": 18_432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "max_position_embeddings": 8_192,
    "q_lora_rank": 1_536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    # Published: 3. With 1, a stack of two layers has both kinds.
    "first_k_dense_replace": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "moe_intermediate_size": 2_048,
}
# Name -> config.json, with fewer positions than published.
CONFIGS: Mapping[str, Mapping[str, object]] = {
    "llama_70b": _LLAMA_3_1_70B,
    "qwen3_235b": _QWEN3_235B,
    "gpt_oss_20b": _GPT_OSS_20B,
    "deepseek_v3": _DEEPSEEK_V3,
}


def describe(
    name: str,
    mesh: Mesh,
    platform: Platform,
    *,
    num_layers: int | None = None,
    splits_experts: bool = False,
    quantization: Quantization = "none",
) -> tuple[ModuleStructure, KernelEncoder]:
    """The structure of one of `CONFIGS` in bfloat16, and the form of its kernels.

    Args:
        num_layers: None is the published number.
    """
    fields = dict(CONFIGS[name])
    if num_layers is not None:
        fields["num_hidden_layers"] = num_layers
    config = read_config(fields)
    encoder = KernelEncoder(platform=platform, num_devices=mesh.size, quantization=quantization)
    make = functools.partial(family_class(config.architecture), config, dtype=jnp.dtype("bfloat16"))
    structure = ModuleStructure(
        config,
        make=make,
        dtype="bfloat16",
        encoder=encoder,
        mesh=mesh,
        splits_experts=splits_experts,
    )
    return structure, encoder


def abstract_model(structure: ModuleStructure, encoder: KernelEncoder) -> LoadedModel:
    """A model whose weights have shapes, dtypes and devices, and no numbers."""
    values = []
    for name, rule, shape in zip(structure.names, structure.rules, structure.shapes, strict=True):
        encode = functools.partial(
            encoder.encode,
            layout=rule.layout,
            is_router=name in structure.routers,
            splits_inputs=splits_inputs(rule),
        )
        value = jax.eval_shape(encode, shape)
        values.append(value.on_mesh(rule.axes) if isinstance(value, StoredKernel) else value)
    names, params, treedef = flatten_state(jax.tree.unflatten(structure.treedef, values))
    return LoadedModel(
        config=structure.config,
        dtype=structure.dtype,
        graphdef=structure.graphdef,
        params_treedef=treedef,
        param_names=names,
        params=params,
        weight_rules=dict(zip(structure.names, structure.rules, strict=True)),
        platform=encoder.platform,
        splits_experts=any("own_experts" in rule.axes for rule in structure.rules),
    )
