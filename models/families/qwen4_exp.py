"""Qwen4-Exp: several residual streams, Gated DeltaNet, attention to blocks that an index chooses,
embeddings of n-grams, and experts.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import jax
import jax.numpy as jnp

from models.config.attention_config import AttentionConfig
from models.config.block_index_config import BlockIndexConfig, BlockIndexedConfig
from models.config.dense_config import read_dense_fields
from models.config.fields import read_count, read_flag, refuse_other_values, with_defaults
from models.config.moe_config import read_expert_fields
from models.config.ngram_config import NGramConfig, read_ngrams
from models.decoder_spec import DecoderSpec, with_states_in
from models.decoders.decoder import Decoder
from models.decoders.shared_moe import make_gated_shared_expert
from models.errors import ModelConfigError, UnsupportedModelError
from models.families.qwen3_5 import join_separate_projections
from models.families.qwen3_next import (
    Qwen3NextConfig,
    mixer_rules,
    read_mixers,
)
from models.forward.carry import Carry
from models.forward.layer_context import LayerContext
from models.layers.block_indexed_attention import GatedBlockIndexedAttention
from models.layers.dense_layers import make_head_normed_attention
from models.layers.experts import packed_or_single_rules
from models.layers.gated_delta_net import GatedDeltaNet
from models.layers.ngram_injection import NGRAMS, NGramInjection, NGramStreamsLayer
from models.layers.residual_streams import StreamConnection, StreamMixer, StreamsLayer
from models.layers.rms_norm import OffsetRMSNorm
from models.layers.self_attention import SelfAttention
from models.weight_rule import WeightRule, with_stored_names

_INDEXED = "indexed_attention"
_HASH_NUMBERS = ("layer_multipliers", "ngram_heads_offsets", "ngram_heads_vocab_sizes")
# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"num_experts": 512, "num_experts_per_tok": 10, "partial_rotary_factor": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen4ExpConfig(Qwen3NextConfig):
    """The config of Qwen4-Exp. Layers without attention have a `GatedDeltaNet`."""

    num_streams: int
    mixer_rank: int  # inner width of a `StreamMixer`
    # Embeddings of n-grams of each layer; None: the layer has none.
    ngrams: tuple[NGramConfig | None, ...]

    def spec(self, kv_dtype: str) -> DecoderSpec:
        # super() without arguments fails here, because `slots=True` creates the class again.
        spec = Qwen3NextConfig.spec(self, kv_dtype)
        first = next(filter(None, self.ngrams), None)
        if first is None:
            return spec
        return with_states_in(spec, list(map(bool, self.ngrams)), NGRAMS, first.format())


class Qwen4ExpForCausalLM(Decoder):
    """Source: huggingface.co/docs/transformers/model_doc/qwen4_exp."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> Qwen4ExpConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS) | {
            # `read_dense_fields` needs a width, but no layer has a dense MLP.
            "intermediate_size": read_count(hf_config, "moe_intermediate_size", 512),
            "layer_types": _with_older_names(hf_config.get("layer_types")),
        }
        own = read_dense_fields(hf_config)
        mixers = read_mixers(hf_config, own, default_num_kv_heads=2)
        gate = hf_config.get("output_gate_type") or own["hidden_act"]
        if gate not in ("silu", "sigmoid"):
            raise UnsupportedModelError(
                f"config.json: output_gate_type is {gate!r}; paxkv supports silu and sigmoid."
            )
        num_streams = read_count(hf_config, "hc_count", 4, minimum=2)
        has_state = [layer is None for layer in mixers["attention"]]
        return Qwen4ExpConfig(
            **own,
            **read_expert_fields(hf_config, default_size=512),
            attention=_with_index(hf_config, mixers["attention"], own["rms_norm_eps"]),
            linear=replace(mixers["linear"], gate=gate),
            has_experts=(True,) * own["num_layers"],
            shared_expert_intermediate_size=read_count(
                hf_config, "shared_expert_intermediate_size", 512
            ),
            normalizes_weights=read_flag(hf_config, "norm_topk_prob", True),
            num_streams=num_streams,
            mixer_rank=read_count(hf_config, "hc_lowrank", 320),
            ngrams=read_ngrams(hf_config, has_state, num_streams=num_streams),
        )

    def __init__(self, config: Qwen4ExpConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        sizes = config.hidden_size, config.num_streams
        rules = {"rank": config.mixer_rank, "eps": config.rms_norm_eps, "dtype": dtype}
        connection = functools.partial(StreamConnection, *sizes, **rules)

        def make_layer(
            attention: BlockIndexedConfig | None, ngrams: NGramConfig | None
        ) -> StreamsLayer:
            make = StreamsLayer
            if ngrams is not None:
                ple = NGramInjection(
                    ngrams, config.hidden_size, eps=config.rms_norm_eps, dtype=dtype
                )
                make = functools.partial(NGramStreamsLayer, ple=ple)
            return make(
                attention=_make_mixer(config, attention, dtype),
                mlp=make_gated_shared_expert(config, dtype),
                attn_hyper_connection=connection(),
                mlp_hyper_connection=connection(),
            )

        super().__init__(
            config,
            layers=list(map(make_layer, config.attention, config.ngrams)),
            norm=StreamMixer(*sizes, **rules),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def embed(self, context: LayerContext) -> Carry:
        """Every stream begins with the token's embedding."""
        hidden = super().embed(context).hidden
        shape = hidden.shape[0], self.config.num_streams, hidden.shape[1]
        return Carry(hidden=jnp.broadcast_to(hidden[:, None], shape))

    def tap(self, carry: Carry) -> jax.Array:
        raise UnsupportedModelError(
            f"{self.config.architecture} has {self.config.num_streams} residual streams; draft "
            "heads that read the hidden states of layers support models with one stream."
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """Checkpoints store mixers as Qwen3.5 does, and may join all experts of a layer."""
        rules = mixer_rules(super().weight_rules(), self.config, join_separate_projections)
        names = {"model.norm.": "model.hyper_connection_mixer."}
        return packed_or_single_rules(with_stored_names(rules, names))

    def ignores_weight(self, name: str) -> bool:
        """Whether a tensor belongs to multi-token prediction, an unused index, or a hash.

        The numbers of hashes are computed from config.json (`NGramConfig`).
        """
        attends_to_all = all(layer.attends_to_all for layer in self.config.attention_layers)
        return (
            name.startswith("mtp.")
            or (attends_to_all and ".indexer." in name)
            or name.rpartition(".")[2] in _HASH_NUMBERS
        )


def _with_older_names(layer_types: object) -> object:
    """The list with the name that `read_mixers` reads. Checkpoints may use either name."""
    if not isinstance(layer_types, list):
        return layer_types
    return ["full_attention" if name == _INDEXED else name for name in layer_types]


def _with_index(
    hf_config: Mapping[str, object], attention: Sequence[AttentionConfig | None], eps: float
) -> tuple[BlockIndexedConfig | None, ...]:
    """Adds the index to all layers with attention."""
    if not any(attention):
        return tuple(attention)
    refuse_other_values(hf_config, {"indexer_kv_heads": 1})
    block_len = read_count(hf_config, "indexer_compress_ratio")
    budget = read_count(hf_config, "indexer_budget")
    if budget % block_len:
        raise ModelConfigError(
            f"config.json: indexer_budget is {budget}; expected a multiple of "
            f"indexer_compress_ratio, which is {block_len}."
        )
    index = BlockIndexConfig(
        num_heads=read_count(hf_config, "indexer_n_heads"),
        head_dim=read_count(hf_config, "indexer_head_dim"),
        block_len=block_len,
        num_chosen=budget // block_len,
        eps=eps,
    )
    own = [field.name for field in fields(AttentionConfig)]
    return tuple(
        layer and BlockIndexedConfig(**{name: getattr(layer, name) for name in own}, index=index)
        for layer in attention
    )


def _make_mixer(
    config: Qwen4ExpConfig, attention: BlockIndexedConfig | None, dtype: jnp.dtype
) -> SelfAttention:
    if attention is None:
        return GatedDeltaNet(config.linear, dtype=dtype)
    return make_head_normed_attention(
        attention,
        norm=functools.partial(OffsetRMSNorm, eps=config.rms_norm_eps, dtype=dtype),
        attention=functools.partial(GatedBlockIndexedAttention, gate=jax.nn.sigmoid),
        dtype=dtype,
    )
