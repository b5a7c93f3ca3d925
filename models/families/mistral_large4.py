"""Mistral Large 4, its language model: latent attention to the tokens that an index chooses, layers
that share latents and choices, trained factors of queries and frequencies, and a soft cap of
logits.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from models.config.dense_config import read_dense_fields
from models.config.fields import read_count, read_layer_numbers, read_number, with_defaults
from models.config.index_config import (
    IndexConfig,
    IndexedLatentConfig,
    is_of_unused_index,
    read_has_index,
    read_index,
    refuse_other_layer_types,
    with_index,
)
from models.config.latent_config import LatentAttentionConfig, read_latent_attention
from models.config.layer_types import read_has_positions
from models.config.moe_config import (
    read_expert_fields,
    read_group_fields,
    read_leading_dense,
    read_mlp_layer_types,
)
from models.config.rope_config import with_default_rope
from models.decoders.moe_decoder import MoEDecoder
from models.decoders.shared_moe import SharedMoEConfig, make_shared_experts
from models.errors import ModelConfigError, UnsupportedModelError
from models.forward.carry import Carry
from models.forward.kernel_settings import KernelSettings
from models.forward.layer_context import LayerContext
from models.layers.index_attention import (
    ChoiceCarry,
    ChoiceSharingLayer,
    IndexedLatentAttention,
)
from models.layers.indexer import NORM_EPS, Indexer, IndexQueries
from models.layers.layer_norm import LayerNorm
from models.layers.position_scale import PositionScale
from models.layers.rms_norm import RMSNorm
from models.layers.routing import Router
from models.layers.routing_rules import PairGroupedSoftmaxTopK
from models.layers.soft_cap import soft_cap_logits
from models.layers.sparse_mlp import SparseMLP
from models.layers.trained_rotary import TrainedRotary
from models.weight_rule import WeightRule, with_stored_names

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"bos_token_id": 1, "eos_token_id": 2, "qk_nope_head_dim": 64, "rms_norm_eps": 1e-5}
_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 2048.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 1.0,
}
# Checkpoints have Mistral's own names, also if transformers saved them.
_STORED_NAMES = {
    "model.embed_tokens.": "tok_embeddings.",
    "model.layers.": "layers.",
    "model.norm.": "norm.",
    "model.rotary_emb.": "lerope.",
    ".input_layernorm.": ".attention_norm.",
    ".post_attention_layernorm.": ".ffn_norm.",
    ".self_attn.": ".attention.",
    ".q_proj.": ".wq.",
    ".kv_a_proj_with_mqa.": ".wkv_a_with_mqa.",
    ".kv_a_layernorm.": ".kv_a_norm.",
    ".kv_b_proj.": ".wkv_b.",
    ".o_proj.": ".wo.",
    ".softmax_scaling.scale": ".ssmax_scaling.s",
    ".softmax_scaling.bias": ".ssmax_scaling.b",
    ".mlp.experts.": ".experts.",
    ".mlp.gate.": ".gate.",
    ".mlp.shared_experts.": ".shared_experts.",
    ".mlp.": ".feed_forward.",
    ".gate_proj.": ".w1.",
    ".down_proj.": ".w2.",
    ".up_proj.": ".w3.",
}
_ROPE_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class MistralLarge4Config(SharedMoEConfig):
    """The config of Mistral Large 4."""

    choose: PairGroupedSoftmaxTopK
    index_top_k: int
    rotary_dim: int
    logits_soft_cap: float


class MistralLarge4ForCausalLM(MoEDecoder):
    """Source: huggingface.co/docs/transformers/model_doc/mistral_large4."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> MistralLarge4Config:
        hf_config = with_default_rope(with_defaults(hf_config, _DEFAULTS), _DEFAULT_ROPE)
        fields = read_dense_fields(hf_config)
        experts = read_expert_fields(
            hf_config,
            num_experts_fields=("n_routed_experts", "num_local_experts"),
            default_num_experts=128,
            default_top_k=4,
            default_size=6144,
        )
        num_layers = fields["num_layers"]
        refuse_other_layer_types(hf_config, num_layers)
        leading_dense = read_leading_dense(hf_config, num_layers, default=1)
        num_shared = read_count(hf_config, "n_shared_experts", 1)
        return MistralLarge4Config(
            **fields,
            **experts,
            attention=_read_attention(hf_config, fields),
            has_experts=read_mlp_layer_types(hf_config, leading_dense),
            choose=_read_choice(hf_config, experts),
            shared_intermediate_size=num_shared * experts["moe_intermediate_size"],
            index_top_k=read_count(hf_config, "index_topk", 2048),
            rotary_dim=read_count(hf_config, "qk_rope_head_dim", 64),
            logits_soft_cap=read_number(hf_config, "final_logit_softcapping", 30.0),
        )

    def __init__(
        self, config: MistralLarge4Config, *, has_head_kernel: bool, dtype: jnp.dtype
    ) -> None:
        super().__init__(
            config,
            layer=ChoiceSharingLayer,
            attention=functools.partial(MistralLarge4Attention, dtype=dtype),
            sparse_mlp=functools.partial(_make_sparse_mlp, config, dtype),
            norm=functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )
        self.rotary_emb = TrainedRotary(config.rotary_dim)

    def weight_rules(self) -> dict[str, WeightRule]:
        return with_stored_names(super().weight_rules(), _STORED_NAMES)

    def ignores_weight(self, name: str) -> bool:
        """See `Decoder.ignores_weight`. The release has a head that drafts tokens."""
        return name.startswith("mtp_dspark.") or is_of_unused_index(name, self.config)

    def name_weight(self, name: str) -> str:
        return "lm_head.weight" if name == "output.weight" else name

    def prepare(self, context: LayerContext) -> LayerContext:
        positions = context.batch.positions
        cos_sin = {
            (rope, rotary_dim): self.rotary_emb.cos_sin(positions, rope, rotary_dim)
            for rope, rotary_dim in context.cos_sin
        }
        return replace(context, cos_sin=cos_sin)

    def embed(self, context: LayerContext) -> Carry:
        return ChoiceCarry.before_layers(super().embed(context), self.config.index_top_k)

    def compute_logits(
        self,
        hidden: jax.Array,  # f[num_logits, hidden]
        kernels: KernelSettings,
    ) -> jax.Array:  # f32[num_logits, vocab]
        return soft_cap_logits(super().compute_logits(hidden, kernels), self.config.logits_soft_cap)


class MistralLarge4Attention(IndexedLatentAttention):
    """Index attention whose queries have trained factors that grow with the position."""

    def __init__(self, config: IndexedLatentConfig, *, dtype: jnp.dtype) -> None:
        super().__init__(config, make_indexer=ScaledIndexer, dtype=dtype)
        self.softmax_scaling = PositionScale(config.num_q_heads, axis="heads", dtype=dtype)

    def _heads(
        self, x: jax.Array, cos: jax.Array, sin: jax.Array, context: LayerContext
    ) -> tuple[jax.Array, jax.Array]:
        q_latent, q_rope = super()._heads(x, cos, sin, context)
        positions = context.of_rows(context.batch.positions)
        # The latent part is linear in the query, so it may get the factor before or after `k_up`.
        scaled = self.softmax_scaling.scaled
        return scaled(q_latent, positions), scaled(q_rope, positions)


class ScaledIndexer(Indexer):
    """An index whose queries have trained factors, and are made of normed hidden states."""

    def __init__(
        self, config: IndexConfig, *, hidden_size: int, query_dim: int, dtype: jnp.dtype
    ) -> None:
        super().__init__(config, hidden_size=hidden_size, query_dim=query_dim, dtype=dtype)
        self.q_input_norm = LayerNorm(query_dim, eps=NORM_EPS, dtype=dtype)
        self.softmax_scaling = PositionScale(config.num_heads, axis=None, dtype=dtype)

    def queries(
        self,
        x: jax.Array,
        normed: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        context: LayerContext,
    ) -> IndexQueries:
        q, weights = super().queries(self.q_input_norm(x), normed, cos, sin, context)
        positions = context.of_rows(context.batch.positions)
        return IndexQueries(self.softmax_scaling.scaled(q, positions), weights)


def _make_sparse_mlp(config: MistralLarge4Config, dtype: jnp.dtype) -> SparseMLP:
    gate = Router(config.hidden_size, config.num_experts, dtype=jnp.dtype("float32"))
    return make_shared_experts(config, gate=gate, choose=config.choose, dtype=dtype)


def _read_choice(
    hf_config: Mapping[str, object], experts: Mapping[str, int]
) -> PairGroupedSoftmaxTopK:
    top_k = experts["num_experts_per_tok"]
    return PairGroupedSoftmaxTopK(
        top_k=top_k,
        normalizes=True,
        factor=read_number(hf_config, "routed_scaling_factor", 1.0),
        **read_group_fields(hf_config, num_experts=experts["num_experts"], top_k=top_k),
    )


def _read_attention(
    hf_config: Mapping[str, object], fields: Mapping[str, object]
) -> tuple[IndexedLatentConfig, ...]:
    num_layers = fields["num_layers"]
    # Queries have no latent.
    without_q_latent = {**hf_config, "q_lora_rank": None}
    one = read_latent_attention(
        without_q_latent, fields["max_position_embeddings"], default_q_latent_dim=1
    )
    _check_rope(one)
    index = read_index(hf_config, default_num_heads=32, turns_neighbors=True)
    has_positions = read_has_positions(hf_config, num_layers)
    owners = _read_owners(hf_config, has_positions)
    layers = []
    for layer_idx, has_index in enumerate(read_has_index(hf_config, num_layers)):
        owner = owners[layer_idx]
        own = replace(
            one,
            norm_eps=fields["rms_norm_eps"],
            has_positions=has_positions[layer_idx],
            kv_layer_idx=None if owner == layer_idx else owner,
        )
        top_k = read_count(hf_config, "index_topk", 2048)
        layers.append(with_index(own, index_top_k=top_k, index=index if has_index else None))
    return tuple(layers)


def _check_rope(attention: LatentAttentionConfig) -> None:
    if attention.rope.kind not in _ROPE_KINDS:
        raise UnsupportedModelError(
            f"config.json: rope type {attention.rope.kind!r} is not supported for "
            f"MistralLarge4ForCausalLM; paxkv supports {', '.join(_ROPE_KINDS)}."
        )


def _read_owners(hf_config: Mapping[str, object], has_positions: list[bool]) -> list[int]:
    """For each layer, the layer whose latents it reads: `kv_source_layers`.

    Raises:
        ModelConfigError: A layer reads latents of a later layer, or of one that has none.
        UnsupportedModelError: A layer with positions reads latents of one without, or the other way
            round; or latents of another such layer that others read come in between.
    """
    num_layers = len(has_positions)
    owners = read_layer_numbers(hf_config, "kv_source_layers")
    if owners is None:
        return list(range(num_layers))
    if len(owners) != num_layers or any(
        not 0 <= owner <= layer_idx or owners[owner] != owner
        for layer_idx, owner in enumerate(owners)
    ):
        raise ModelConfigError(
            f"config.json: kv_source_layers is {owners}; expected a number for each of "
            f"{num_layers} layers: its own, or that of an earlier layer that has its own number."
        )
    # transformers keeps the latents of one layer with positions and of one without: the last ones
    # that a later layer reads.
    kept = {}
    for layer_idx, owner in enumerate(owners):
        kind = has_positions[layer_idx]
        if owner == layer_idx and owner in owners[layer_idx + 1 :]:
            kept[kind] = layer_idx
        elif owner != layer_idx and kept.get(kind) != owner:
            raise UnsupportedModelError(
                f"config.json: kv_source_layers={owners} is not supported: layer {layer_idx} reads "
                f"the latents of layer {owner}; paxkv supports the last layer before it that "
                "shares its latents and that has the same number in no_rope_layers."
            )
    return owners
