"""Mixtures of attention heads: attention whose queries and output are projected by experts."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from models.cache.format import Pages
from models.config.attention_config import AttentionConfig
from models.forward.carry import Carry
from models.forward.layer_context import LayerContext
from models.layers.attention import Attention, Norm
from models.layers.decoder_layers import PreNormLayer
from models.layers.experts import (
    ExpertLinear,
    choices_of_used_rows,
    sum_of_choices,
    tiles_of_choices,
)
from models.layers.routing import Router, Routing, SoftmaxTopK
from models.weight_rule import Source, WeightRule


class RoutedHeads(NamedTuple):
    """The heads' outputs, and the experts that the queries came from (`Routing`)."""

    attended: jax.Array  # f[num_queries, num_q_heads, head_dim]
    expert_ids: jax.Array  # i32[num_queries, top_k]
    weights: jax.Array  # f32[num_queries, top_k]


class ExpertAttention(Attention):
    """Attention whose experts project queries and the output, and share keys and values.

    A token chooses `top_k` experts. Each of them makes one query for every KV head, and projects
    what these queries attend to. The output is the weighted sum of the experts, plus one bias.

    Query heads are ordered by KV head, and then by choice. The rows of experts are not reported
    (`EXPERT_TOKENS`): a report only has the rows of the MLP.

    Source: Mixture of Attention Heads, arXiv:2210.05144.
    """

    def __init__(
        self,
        config: AttentionConfig,
        *,
        num_experts: int,
        choose: SoftmaxTopK,
        dtype: jnp.dtype,
    ) -> None:
        """Makes the layer with weights to be filled in.

        Args:
            config: Has `choose.top_k` query heads for each KV head.
        """
        super().__init__(config, dtype=dtype)
        sizes = config.hidden_size, config.num_kv_heads * config.head_dim
        self.router = Router(config.hidden_size, num_experts, dtype=dtype)
        options = {"is_of_attention": True, "dtype": dtype}
        self.q_proj = ExpertLinear(num_experts, *sizes, split="out", **options)
        self.o_proj = ExpertLinear(num_experts, *sizes[::-1], split="in", **options)
        self.bias = nnx.Param(jnp.zeros((config.hidden_size,), dtype))
        self.num_experts = num_experts
        self.choose = choose

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`."""
        source = Source(name=f"{name}.bias", shape=(self.config.hidden_size,))
        rule = WeightRule(sources=(source,), layout="vector", axes=(None,))
        return super().weight_rules(name) | {"bias": rule}

    def __call__(
        self, hidden: jax.Array, pages: Pages, context: LayerContext, *, norm: Norm
    ) -> tuple[RoutedHeads, Pages]:
        """See `AttentionBase.__call__`. `project_out` needs the experts of the queries, too."""
        (q, routing), k, v = self.project_in(hidden, context, norm=norm)
        attended, pages = self.attend(q, (k, v), pages, context)
        return RoutedHeads(attended, *routing), pages

    def project_out(
        self, heads: RoutedHeads, context: LayerContext
    ) -> jax.Array:  # f[num_queries, hidden]
        num_rows, top_k = heads.expert_ids.shape
        by_kv_head = heads.attended.reshape(num_rows, -1, top_k, self.config.head_dim)
        by_choice = by_kv_head.swapaxes(1, 2).reshape(num_rows * top_k, -1)
        choices = choices_of_used_rows(heads.expert_ids, self.num_experts, context)
        tiles = tiles_of_choices(choices, self.num_experts, context)
        out = self.o_proj(by_choice[tiles.rows], tiles, context)
        total = sum_of_choices(out, tiles.places, heads.weights)
        return total.astype(out.dtype) + self.bias[...]

    def _queries(
        self, normed: jax.Array, cos: jax.Array, sin: jax.Array, context: LayerContext
    ) -> tuple[jax.Array, Routing]:  # f[num_rows, num_q_heads, head_dim]
        routing = self.router.route(normed, self.choose)
        num_rows, top_k = routing.expert_ids.shape
        choices = choices_of_used_rows(routing.expert_ids, self.num_experts, context)
        tiles = tiles_of_choices(choices, self.num_experts, context)
        in_tiles = self.q_proj(normed[tiles.rows // top_k], tiles, context)
        by_choice = in_tiles.at[tiles.places].get(mode="fill", fill_value=0)
        by_choice = by_choice.reshape(num_rows, top_k, -1, self.config.head_dim)
        q = by_choice.swapaxes(1, 2).reshape(num_rows, -1, self.config.head_dim)
        return self._placed(q, self.q_norm, cos, sin), routing


class ExpertAttentionLayer(PreNormLayer):
    """`PreNormLayer` with an `ExpertAttention`, whose output projection needs its routing."""

    def __call__(self, carry: Carry, pages: Pages, context: LayerContext) -> tuple[Carry, Pages]:
        heads, pages = self.self_attn(carry.hidden, pages, context, norm=self.input_layernorm)

        def add_parts(
            hidden: jax.Array,
            attended: jax.Array,
            expert_ids: jax.Array,
            weights: jax.Array,
            context: LayerContext,
        ) -> jax.Array:
            return self._add_parts(hidden, RoutedHeads(attended, expert_ids, weights), context)

        hidden = context.of_kept().by_token(add_parts, context.kept(carry.hidden), *heads)
        return Carry(hidden=hidden), pages
