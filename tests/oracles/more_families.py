"""Further configurations, with options that those of `families.py` leave at their defaults.

Importing this module adds `MORE` to `families.EXTRA`.
"""

import functools

import torch
import transformers

from tests.oracles import families

_Config = transformers.PreTrainedConfig


def _with_fields(
    family: str, config_class: str | None = None, **fields: object
) -> functools.partial[_Config]:
    """Makes the configuration of another family, with some fields changed.

    Args:
        config_class: None: that of the other family.
    """
    return functools.partial(_make_changed, family, config_class, fields)


def _make_changed(family: str, config_class: str | None, fields: dict[str, object]) -> _Config:
    name, fields = _changed_spec(family, config_class, fields)
    return getattr(transformers, name)(**fields)


def _changed_spec(
    family: str, config_class: str | None, fields: dict[str, object]
) -> tuple[str, dict[str, object]]:
    name, own = _spec(family)
    return config_class or name, own | fields


def _spec(family: str) -> tuple[str, dict[str, object]]:
    """As `families.spec`, which returns the fields of the other family for `_with_fields`."""
    make = MORE.get(family)
    if isinstance(make, functools.partial):
        return _changed_spec(*make.args)
    return families.spec(family)


_FULL = "full_attention"
MORE = {
    # Norms of heads, parallel residual, biases, and half of each head turned.
    "stablelm-2": lambda: transformers.StableLmConfig(
        vocab_size=families.VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        qk_layernorm=True,
        use_parallel_residual=True,
        use_qkv_bias=True,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.5,
        },
    ),
    # Queries grow after every 16 positions, so short prompts have them too.
    "ministral3-far": _with_fields(
        "ministral3",
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    ),
    "olmo-clipped": _with_fields("olmo", clip_qkv=1.0),
    "phi-normed": _with_fields("phi", qk_layernorm=True),
    # No norms after attention and after the MLP, and all factors.
    "hyperclovax-prenorm": _with_fields(
        "hyperclovax",
        use_post_norm=False,
        embedding_multiplier=12.0,
        logits_scaling=0.5,
        residual_multiplier=0.22,
        attention_multiplier=0.125,
    ),
    # Every MLP dense.
    "mimo-v2-flash-dense": lambda: transformers.MiMoV2FlashConfig(
        vocab_size=families.VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        v_head_dim=16,
        sliding_window=24,
        max_position_embeddings=1024,
        layer_types=["full_attention"] + ["sliding_attention"] * 4 + ["full_attention"],
        mlp_layer_types=["dense"] * 6,
    ),
    # A gate for each feature, capped scores of experts, and the rotary embedding of releases.
    "laguna-per-element": _with_fields(
        "laguna",
        gating="per-element",
        attention_bias=True,
        moe_router_logit_softcapping=0.5,
        moe_routed_scaling_factor=2.5,
        rope_parameters={
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 500_000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 128,
                "partial_rotary_factor": 0.5,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
    # Logits grow from position 16 on, and heads of both kinds of layers differ.
    "inkling-far": _with_fields(
        "inkling",
        log_scaling_n_floor=16,
        log_scaling_alpha=0.5,
        num_key_value_heads=1,
        swa_num_attention_heads=8,
        swa_num_key_value_heads=4,
        conv_kernel_size=3,
        n_shared_experts=1,
    ),
    # The factors of releases, and a vocabulary head that is the embedding.
    "granite-moe-tied": _with_fields(
        "granite-moe",
        embedding_multiplier=12.0,
        logits_scaling=6.0,
        residual_multiplier=0.22,
        attention_multiplier=0.0625,
        tie_word_embeddings=True,
    ),
    "granite-moe-shared": _with_fields(
        "granite-moe", "GraniteMoeSharedConfig", shared_intermediate_size=48
    ),
    # BLOOM's and Falcon's slopes for a number of heads that is no power of two.
    "bloom-6-heads": _with_fields("bloom", hidden_size=96, n_head=6),
    # Windows, biases, and one KV head.
    "doge-window": _with_fields(
        "doge",
        sliding_window=24,
        num_key_value_heads=1,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    ),
    # Queries grow as in "ministral3-far", and are projected without a latent. Groups of experts,
    # and weights that are not normalized.
    "mistral4-far": _with_fields(
        "mistral4",
        q_lora_rank=None,
        n_group=2,
        norm_topk_prob=False,
        routed_scaling_factor=1.5,
        rope_interleave=False,
        attention_bias=True,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "mscale": 0.5,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    ),
    # More tokens to choose than a request can have, so that all are attended to.
    "glm5-dsa-all": _with_fields("glm5-dsa", index_topk=2048),
    # Two shared blocks, in turn, and no adapters of attention.
    "zamba2-blocks": _with_fields(
        "zamba2",
        num_hidden_layers=4,
        layers_block_type=["linear_attention", "hybrid", "hybrid", "hybrid"],
        num_mem_blocks=2,
        use_shared_attention_adapter=False,
        use_mem_rope=False,
        mamba_ngroups=2,
        mamba_d_state=32,
    ),
    # More blocks to choose than a request can have, so that all are attended to; sigmoid gates.
    "qwen4-exp-all": _with_fields(
        "qwen4-exp", indexer_budget=2048, output_gate_type="sigmoid", tie_word_embeddings=True
    ),
    # Blocks of the index that do not fill those of the cache, and half of each head turned.
    "qwen4-exp-odd": _with_fields(
        "qwen4-exp",
        indexer_compress_ratio=3,
        indexer_budget=15,
        hc_count=3,
        norm_topk_prob=False,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.5,
        },
    ),
    # A norm after the gate of Mamba2, of each of two groups.
    "falcon-h1-normed": _with_fields(
        "falcon-h1", mamba_rms_norm=True, mamba_norm_before_gate=False, mamba_n_groups=2
    ),
    # Wider convolutions, windows, biases of projections, and tokens that skip the experts.
    "zaya-skips": _with_fields(
        "zaya",
        attention_bias=True,
        cca_time0=3,
        cca_time1=4,
        layer_types=["hybrid", "hybrid_sliding"] * 2,
        sliding_window=24,
        tie_word_embeddings=False,
    ),
}
families.EXTRA.update(MORE)

# Lengths of the prompts of families whose layers keep few tokens: shorter ones fill no small pool.
# Those of phi3-longrope are longer than its original length, as engines have long factors then.
PROMPT_LENS = {
    "llama4": (45, 61, 80, 90),
    "llama4-vision": (45, 61, 80, 90),
    "starcoder2": (45, 61, 80, 90),
    "doge-window": (45, 61, 80, 90),
    **dict.fromkeys(("inkling", "inkling-vision"), (3, 31, 63, 90)),
    "inkling-far": (15, 47, 63, 90),
    "phi3-longrope": (65, 71, 80, 90),
}


def _with_few_layers(family: str) -> _Config:
    """The family's checkpoint with a layer of each kind that lists of layers name, or with two."""
    name, fields = _spec(family)
    names = {"num_hidden_layers", "n_layer", "n_layers"} & fields.keys()
    # Nemotron-H has no number besides its list.
    (num_layers,) = [fields[name] for name in names] or [len(fields["layers_block_type"])]
    # Lists with an entry for each layer: kinds of layers, for example.
    lists = {
        key: value
        for key, value in fields.items()
        if isinstance(value, list) and len(value) == num_layers
    }
    kinds = list(zip(*lists.values(), strict=True))
    kept = sorted({kinds.index(kind) for kind in kinds})
    if len(kept) < 2:
        kept = [0, num_layers - 1]
    changed = {key: [value[idx] for idx in kept] for key, value in lists.items()}
    changed |= dict.fromkeys(names, len(kept))
    return getattr(transformers, name)(**fields | changed)


_SLIDING = "sliding_attention"
_ALL = families.FAMILIES | families.EXTRA | families.NEWEST
# Families with fewer layers. They keep each kind of layer, so their programs compute the same, and
# take about half the time to compile. The entries after the first are of families whose kinds of
# layers are not in lists, or that have more than they need.
SHALLOW = {family: functools.partial(_with_few_layers, family) for family in _ALL} | {
    **{family: _ALL[family] for family in ("dory", "dbrx", "longcat-flash")},
    "bamba": _with_fields("bamba", num_hidden_layers=2, attn_layer_indices=[1]),
    "jamba": _with_fields("jamba", num_hidden_layers=2, attn_layer_period=2, attn_layer_offset=1),
    "qwen3-next": _with_fields("qwen3-next", num_hidden_layers=2, full_attention_interval=2),
    "qwen4-exp-ple": _with_fields(
        "qwen4-exp-ple",
        num_hidden_layers=2,
        layer_types=["linear_attention", "indexed_attention"],
        ple_layer_ids=[1],
    ),
    # Two layers share a block.
    "zamba": _with_fields(
        "zamba", num_hidden_layers=3, layers_block_type=["linear_attention", "hybrid", "hybrid"]
    ),
    "zamba2": _with_fields(
        "zamba2",
        num_hidden_layers=3,
        layers_block_type=["linear_attention", "hybrid", "hybrid"],
    ),
    # Each block is in a layer.
    "zamba2-blocks": _with_fields(
        "zamba2-blocks", num_hidden_layers=2, layers_block_type=["hybrid", "hybrid"]
    ),
    "ernie4.5-moe": _with_fields("ernie4.5-moe", num_hidden_layers=2, moe_layer_end_index=1),
    # The second layer uses the choice of the first.
    **{
        family: _with_fields(
            family,
            num_hidden_layers=2,
            indexer_types=["full", "shared"],
            mlp_layer_types=["dense", "sparse"],
        )
        for family in ("glm5-dsa", "glm5-dsa-all")
    },
    "gemma2": _with_fields("gemma2", num_hidden_layers=2, layer_types=[_SLIDING, _FULL]),
    "gemma3": _with_fields("gemma3", num_hidden_layers=2, layer_types=[_SLIDING, _FULL]),
    "gemma4-dense": _with_fields(
        "gemma4-dense", num_hidden_layers=2, layer_types=[_SLIDING, _FULL]
    ),
    # The last two layers read the caches of the second and the third.
    "gemma4-ple": _with_fields(
        "gemma4-ple",
        num_hidden_layers=5,
        num_kv_shared_layers=2,
        layer_types=[_SLIDING, _SLIDING, _FULL, _SLIDING, _FULL],
    ),
    # A sparse layer and two that are not. The last two layers read the caches of others.
    "gemma3n": _with_fields(
        "gemma3n",
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        layer_types=[_SLIDING, _FULL, _SLIDING, _FULL],
        activation_sparsity_pattern=[0.95, 0.0, 0.0, 0.0],
        intermediate_size=[96, 80, 96, 96],
    ),
    "gpt-oss": _with_fields("gpt-oss", num_hidden_layers=2, layer_types=[_SLIDING, _FULL]),
    # Layers with chunks, with experts, and with experts and no positions.
    "llama4": _with_fields(
        "llama4", num_hidden_layers=3, no_rope_layers=[1, 1, 0], moe_layers=[1, 2]
    ),
    "gemma4-moe": _with_fields("gemma4-moe", num_hidden_layers=2, layer_types=[_SLIDING, _FULL]),
    # The first layer has no experts.
    "mimo-v2-flash": _with_fields(
        "mimo-v2-flash", num_hidden_layers=2, layer_types=[_FULL, _SLIDING]
    ),
    "mimo-v2-flash-dense": _with_fields(
        "mimo-v2-flash-dense",
        num_hidden_layers=3,
        layer_types=[_SLIDING, _SLIDING, _FULL],
        mlp_layer_types=["dense"] * 3,
    ),
    # The first layer has no experts.
    **{
        family: _with_fields(
            family,
            num_hidden_layers=2,
            layer_types=[_SLIDING, _FULL],
            mlp_layer_types=["dense", "sparse"],
            num_attention_heads_per_layer=[4, 8],
        )
        for family in ("laguna", "laguna-per-element")
    },
    "exaone-moe": _with_fields(
        "exaone-moe",
        num_hidden_layers=2,
        layer_types=[_SLIDING, _FULL],
        mlp_layer_types=["dense", "sparse"],
    ),
    "granite-moe-swa": _with_fields(
        "granite-moe-swa",
        num_hidden_layers=2,
        layer_types=[_SLIDING, _FULL],
        layer_rope_theta=[10_000.0, 0],
    ),
    "afmoe": _with_fields("afmoe", num_hidden_layers=2, layer_types=[_SLIDING, _FULL]),
}

# Checkpoint -> attention of transformers that computes it as the release does. For Falcon, "eager"
# adds ALiBi's bias to the mask and to the logits, so twice.
ATTENTION = {"falcon-rw": "sdpa"}


def _choose_by_token(model: torch.nn.Module) -> None:
    """Makes tokens differ, so that some choose each expert, and some none. Lengthens keys."""
    model.get_input_embeddings().weight.data *= 50.0
    for name, parameter in model.named_parameters():
        if name.endswith("router_mlp.out_proj.weight"):
            parameter.data *= 8.0
        elif name.endswith("qk_norm.temp"):
            parameter.data += 1.0
    for name, buffer in model.named_buffers():
        if name.endswith("balancing_biases"):
            buffer[-1] = 0.1


# Checkpoint -> what changes its random weights.
CHANGES = {"zaya-skips": _choose_by_token}
