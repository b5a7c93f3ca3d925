"""Gemma 3n (text): several residual streams, embeddings per layer, four sliding-window layers to
one full layer, and later layers that read the keys and values of earlier ones.
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from models.cache.format import Pages
from models.config.attention_config import AttentionConfig
from models.config.fields import read_count, read_flag
from models.config.kv_sharing import is_of_shared_kv, read_kv_owners
from models.config.layer_types import read_layer_types, read_sliding_window, with_window
from models.config.rope_config import parse_ropes_by_layer_type
from models.decoders.decoder import Decoder
from models.errors import ModelConfigError
from models.families.gemma2 import (
    GemmaConfig,
    read_gemma_fields,
    read_gemma_head_fields,
    read_logits_soft_cap,
)
from models.forward.carry import Carry
from models.forward.kernel_settings import KernelSettings
from models.forward.layer_context import LayerContext
from models.layers.altup import AltUp, with_magnitude_of
from models.layers.attention import Attention, AttentionBase, SharedKVAttention
from models.layers.decoder_layers import SandwichNormLayer
from models.layers.linear import Embedding, Linear
from models.layers.mlp import GatedMLP, activate
from models.layers.per_layer_inputs import PerLayerCarry, mix_per_layer_inputs, scaled
from models.layers.rms_norm import RoundedLastRMSNorm, UnscaledRMSNorm
from models.layers.soft_cap import soft_cap_logits
from models.layers.sparse_gate_mlp import SparseGateMLP


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3nConfig(GemmaConfig):
    """The config of Gemma 3n."""

    intermediate_sizes: tuple[int, ...]  # of each layer
    sparsities: tuple[float, ...]  # of the gate of each layer's MLP; 0: the gate is used as it is
    per_layer_size: int  # width of the token embeddings of one layer
    per_layer_vocab_size: int
    laurel_rank: int
    num_streams: int
    active_stream_idx: int  # the stream that layers compute
    scales_corrected: bool  # whether the corrected stream is scaled before the embeddings are added


class Gemma3nForCausalLM(Decoder):
    """Source: huggingface.co/docs/transformers/model_doc/gemma3n."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> Gemma3nConfig:
        num_layers = read_count(hf_config, "num_hidden_layers")
        sizes = _read_list(hf_config, "intermediate_size", num_layers)
        if sizes is None:
            sizes = [read_count(hf_config, "intermediate_size", 16_384)] * num_layers
        fields = read_gemma_fields({**hf_config, "intermediate_size": sizes[0]})
        num_streams = read_count(hf_config, "altup_num_inputs", 4)
        active_idx = read_count(hf_config, "altup_active_idx", 0, minimum=0)
        if active_idx >= num_streams:
            raise ModelConfigError(
                f"config.json: altup_active_idx is {active_idx}, and altup_num_inputs is "
                f"{num_streams}; expected a smaller number."
            )
        return Gemma3nConfig(
            **fields,
            attention=_read_attention(hf_config, fields),
            logits_soft_cap=read_logits_soft_cap({"final_logit_softcapping": 30.0, **hf_config}),
            intermediate_sizes=tuple(sizes),
            sparsities=_read_sparsities(hf_config, num_layers),
            per_layer_size=read_count(hf_config, "hidden_size_per_layer_input", 256),
            per_layer_vocab_size=read_count(hf_config, "vocab_size_per_layer_input", 262_144),
            laurel_rank=read_count(hf_config, "laurel_rank", 64),
            num_streams=num_streams,
            active_stream_idx=active_idx,
            scales_corrected=read_flag(hf_config, "altup_correct_scale", True),
        )

    def __init__(self, config: Gemma3nConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        hidden_size, num_others = config.hidden_size, config.num_streams - 1
        norm = functools.partial(RoundedLastRMSNorm, eps=config.rms_norm_eps, dtype=dtype)
        super().__init__(
            config,
            layers=[Gemma3nLayer(config, idx, dtype=dtype) for idx in range(config.num_layers)],
            norm=norm(hidden_size),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
            embedding_scale=config.embedding_scale,
        )
        width = config.num_layers * config.per_layer_size
        self.embed_tokens_per_layer = Embedding(
            config.per_layer_vocab_size, width, dtype=dtype, scale=config.per_layer_size**0.5
        )
        self.per_layer_model_projection = Linear(hidden_size, width, dtype=dtype)
        self.per_layer_projection_norm = norm(config.per_layer_size)
        square = functools.partial(Linear, hidden_size, hidden_size, dtype=dtype)
        self.altup_projections = nnx.List([square() for _ in range(num_others)])
        self.altup_unembed_projections = nnx.List([square() for _ in range(num_others)])

    def ignores_weight(self, name: str) -> bool:
        return is_of_shared_kv(name, self.config.attention)

    def embed(self, context: LayerContext) -> Carry:
        hidden = super().embed(context).hidden
        token_ids = context.batch.token_ids
        if self.config.per_layer_vocab_size < self.config.vocab_size:
            # Tokens of images and audio, which have no embeddings of their own here.
            token_ids = jnp.where(token_ids < self.config.per_layer_vocab_size, token_ids, 0)
        streams, inputs = context.by_token(self._streams_and_inputs, token_ids, hidden)
        return PerLayerCarry(hidden=streams, per_layer_inputs=inputs)

    def tap(self, carry: Carry) -> jax.Array:
        return carry.hidden[:, self.config.active_stream_idx]

    def finish(self, carry: Carry) -> jax.Array:
        first = carry.hidden[:, 0]
        streams = [first]
        for stream_idx, linear in enumerate(self.altup_unembed_projections, start=1):
            projected = linear.product(carry.hidden[:, stream_idx]).astype(first.dtype)
            streams.append(with_magnitude_of(projected, first))
        mean = jnp.stack(streams).astype(jnp.float32).mean(axis=0)
        return self.norm(mean.astype(first.dtype))

    def compute_logits(
        self,
        hidden: jax.Array,  # f[num_logits, hidden]
        kernels: KernelSettings,
    ) -> jax.Array:  # f32[num_logits, vocab]
        return soft_cap_logits(super().compute_logits(hidden, kernels), self.config.logits_soft_cap)

    def _streams_and_inputs(
        self,
        token_ids: jax.Array,  # i32[num_tokens]
        embedded: jax.Array,  # f[num_tokens, hidden]
        context: LayerContext,
    ) -> tuple[jax.Array, jax.Array]:
        """The streams f[num_tokens, num_streams, hidden], and the inputs of `PerLayerCarry`."""
        others = [
            with_magnitude_of(linear(embedded, context), embedded)
            for linear in self.altup_projections
        ]
        inputs = mix_per_layer_inputs(
            self.embed_tokens_per_layer(token_ids),
            self.per_layer_model_projection(embedded, context),
            num_layers=self.config.num_layers,
            hidden_size=self.config.hidden_size,
            norm=self.per_layer_projection_norm,
        )
        return jnp.stack([embedded, *others], axis=1), inputs


class Laurel(nnx.Module):
    """Adds a normed product of low rank.

    Source: arXiv:2411.07501.
    """

    def __init__(self, config: Gemma3nConfig, *, dtype: jnp.dtype) -> None:
        self.linear_left = Linear(config.hidden_size, config.laurel_rank, dtype=dtype)
        self.linear_right = Linear(config.laurel_rank, config.hidden_size, dtype=dtype)
        self.post_laurel_norm = RoundedLastRMSNorm(
            config.hidden_size, eps=config.rms_norm_eps, dtype=dtype
        )

    def __call__(self, x: jax.Array, context: LayerContext) -> jax.Array:
        out = self.linear_right(self.linear_left(x, context), context)
        return x + self.post_laurel_norm(out)


class Gemma3nLayer(SandwichNormLayer):
    """Gemma 2's layer on one of several streams, with a low-rank product parallel to attention."""

    def __init__(self, config: Gemma3nConfig, layer_idx: int, *, dtype: jnp.dtype) -> None:
        norm = functools.partial(
            RoundedLastRMSNorm, config.hidden_size, eps=config.rms_norm_eps, dtype=dtype
        )
        super().__init__(
            attention=_make_attention(config.attention[layer_idx], config, dtype),
            mlp=_make_mlp(config, layer_idx, dtype),
            norm=norm,
        )
        self.altup = AltUp(
            config.hidden_size,
            config.num_streams,
            active_idx=config.active_stream_idx,
            eps=config.rms_norm_eps,
            dtype=dtype,
        )
        self.laurel = Laurel(config, dtype=dtype)
        self.per_layer_input_gate = Linear(config.hidden_size, config.per_layer_size, dtype=dtype)
        self.per_layer_projection = Linear(config.per_layer_size, config.hidden_size, dtype=dtype)
        self.post_per_layer_input_norm = norm()
        self.scales_corrected = config.scales_corrected

    def __call__(
        self, carry: PerLayerCarry, pages: Pages, context: LayerContext
    ) -> tuple[PerLayerCarry, Pages]:
        predictions = context.by_token(self.altup.predict, carry.hidden)
        active = predictions[:, self.altup.active_idx]
        attended, pages = self.self_attn(active, pages, context, norm=self.input_layernorm)
        own_inputs = context.kept(carry.own_inputs(context))
        streams = context.of_kept().by_token(
            self._compute_streams, context.kept(predictions), attended, own_inputs
        )
        return dataclasses.replace(carry, hidden=streams), pages

    def _compute_streams(
        self,
        predictions: jax.Array,  # f[num_queries, num_streams, hidden]
        attended: jax.Array,  # f[num_queries, num_q_heads, head_dim]
        own_inputs: jax.Array,  # f[num_queries, per_layer_size]
        context: LayerContext,
    ) -> jax.Array:  # f[num_queries, num_streams, hidden]
        active = predictions[:, self.altup.active_idx]
        computed = self._add_parts(active, attended, context)
        streams = self.altup.correct(predictions, computed, context)
        first = streams[:, self.altup.active_idx]
        if self.scales_corrected:
            first = self.altup.correct_output_scale(first)
        gate = activate(self.per_layer_input_gate(first, context), self.mlp.activation)
        out = self.post_per_layer_input_norm(self.per_layer_projection(gate * own_inputs, context))
        # The first stream gets nothing, whichever stream is active.
        return streams.at[:, 1:].add(out[:, None, :])

    def _add_parts(
        self, hidden: jax.Array, attended: jax.Array, context: LayerContext
    ) -> jax.Array:
        low_rank = self.laurel(self.input_layernorm(hidden), context)
        out = self.self_attn.project_out(attended, context)
        hidden = hidden + self.post_attention_layernorm(out)
        hidden = scaled(hidden + low_rank, 0.5**0.5)
        out = self.mlp(self.pre_feedforward_layernorm(hidden), context)
        return hidden + self.post_feedforward_layernorm(out)


def _make_attention(
    attention: AttentionConfig, config: Gemma3nConfig, dtype: jnp.dtype
) -> AttentionBase:
    eps = config.rms_norm_eps
    norm = functools.partial(RoundedLastRMSNorm, attention.head_dim, eps=eps, dtype=dtype)
    if attention.kv_layer_idx is not None:
        return SharedKVAttention(attention, q_norm=norm(), dtype=dtype)
    v_norm = UnscaledRMSNorm(eps=eps)
    return Attention(attention, q_norm=norm(), k_norm=norm(), v_norm=v_norm, dtype=dtype)


def _make_mlp(config: Gemma3nConfig, layer_idx: int, dtype: jnp.dtype) -> GatedMLP:
    sparsity = config.sparsities[layer_idx]
    make = functools.partial(SparseGateMLP, sparsity=sparsity) if sparsity else GatedMLP
    return make(
        config.hidden_size,
        config.intermediate_sizes[layer_idx],
        activation=config.hidden_act,
        dtype=dtype,
    )


def _read_attention(
    hf_config: Mapping[str, object], fields: Mapping[str, object]
) -> tuple[AttentionConfig, ...]:
    """Reads the attention of each layer: by default, every fifth is full and the others slide."""
    num_layers, max_positions = fields["num_layers"], fields["max_position_embeddings"]
    window = read_sliding_window(hf_config, default=512)
    is_sliding = [(layer_idx + 1) % 5 != 0 for layer_idx in range(num_layers)]
    layer_types = read_layer_types(hf_config, is_sliding, sliding_window=window)
    rope, sliding_rope = parse_ropes_by_layer_type(hf_config, max_positions)
    owners = read_kv_owners(hf_config, layer_types, default_num_shared=15)
    heads = read_gemma_head_fields({"num_key_value_heads": 2, **hf_config}) | {"scale": 1.0}
    layers = []
    for layer_type, owner in zip(layer_types, owners, strict=True):
        is_full = layer_type == "full_attention"
        layer = AttentionConfig(**heads, rope=rope if is_full else sliding_rope, kv_layer_idx=owner)
        layers.append(layer if is_full else with_window(layer, window, max_positions))
    return tuple(layers)


def _read_sparsities(hf_config: Mapping[str, object], num_layers: int) -> tuple[float, ...]:
    """For each layer, the share of the gate's numbers that become 0: 0.95 in the first ten."""
    name = "activation_sparsity_pattern"
    written = _read_list(hf_config, name, num_layers)
    if written is None:
        num_sparse = 10 if num_layers > 10 else 0
        return (0.95,) * num_sparse + (0.0,) * (num_layers - num_sparse)
    if any(not 0 <= sparsity < 1 for sparsity in written):
        raise ModelConfigError(
            f"config.json: {name} is {written}; expected numbers from 0 to below 1."
        )
    return tuple(map(float, written))


def _read_list(
    hf_config: Mapping[str, object], name: str, num_layers: int
) -> list[int | float] | None:
    """Reads a list with one number for each layer; None if the field is no list."""
    written = hf_config.get(name)
    if not isinstance(written, list):
        return None
    if len(written) != num_layers or any(
        isinstance(value, bool) or not isinstance(value, int | float) for value in written
    ):
        raise ModelConfigError(
            f"config.json: {name} is {written!r}; expected one number for each of {num_layers} "
            "layers."
        )
    return written
