"""Latent attention to the tokens that an index chooses, and layers that share such a choice."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from models.cache.format import Pages
from models.config.index_config import INDEX_KEYS, IndexedLatentConfig
from models.forward.carry import Carry
from models.forward.layer_context import LayerContext
from models.layers.decoder_layers import PreNormLayer
from models.layers.index_attend import attend_to_tokens, choose_tokens
from models.layers.indexer import Indexer, IndexQueries
from models.layers.latent_attend import latent_attend, write_vectors
from models.layers.latent_attention import LatentAttention
from models.layers.self_attention import Norm
from pallas_kernels import NO_POSITION


class IndexedLatentAttention(LatentAttention):
    """Latent attention of each token to few earlier tokens, which the layer's index chooses.

    A layer without an index (`IndexedLatentConfig.index`) gets the choice of an earlier layer. If
    no request can have more tokens than are chosen, there is no index.

    Source: DeepSeek-V3.2, arXiv:2512.02556, section 2.1.
    """

    def __init__(
        self,
        config: IndexedLatentConfig,
        *,
        make_indexer: Callable[..., Indexer] = Indexer,
        dtype: jnp.dtype,
    ) -> None:
        """Makes the layer with weights to be filled in.

        Args:
            make_indexer: Takes the arguments of `Indexer`.
        """
        super().__init__(config, dtype=dtype)
        index = config.index if config.has_index else None
        self.indexer = index and make_indexer(
            index,
            hidden_size=config.hidden_size,
            query_dim=config.q_latent_dim or config.hidden_size,
            dtype=dtype,
        )

    def __call__(
        self, hidden: jax.Array, pages: Pages, context: LayerContext, *, norm: Norm
    ) -> tuple[jax.Array, Pages]:
        """See `SelfAttention.__call__`. The layer must have an index, or attend to all tokens."""
        attended, _, pages = self.attend_to_chosen(hidden, None, pages, context, norm=norm)
        return attended, pages

    def attend_to_chosen(
        self,
        hidden: jax.Array,  # f[num_tokens, hidden]
        chosen: jax.Array | None,  # i32[num_queries, index_top_k]
        pages: Pages,
        context: LayerContext,
        *,
        norm: Norm,
    ) -> tuple[jax.Array, jax.Array | None, Pages]:
        """As `__call__`; it also returns the choice.

        Args:
            chosen: The choice of an earlier layer. It is not used if the layer has an index.
        """
        (*queries, index_queries), (latents, keys) = self.project_in(hidden, context, norm=norm)
        # All writes come before the reads, so that no write waits for a read of the same layer.
        if self.indexer is not None:
            pages = write_vectors(keys, pages, context, cache_name=INDEX_KEYS)
        pages = write_vectors(latents, pages, context)
        if self.indexer is not None:
            chosen = choose_tokens(self.config, index_queries, pages, context)
        arguments = {"pages": pages, "context": context}
        if self.config.attends_to_all:
            attend = functools.partial(latent_attend, self.config, **arguments)
        else:
            attend = functools.partial(attend_to_tokens, self.config, **arguments)
            queries.append(chosen)
        return self.attend_with(attend, tuple(queries), context), chosen, pages

    def _queries(
        self, normed: jax.Array, cos: jax.Array, sin: jax.Array, context: LayerContext
    ) -> tuple[jax.Array, jax.Array, IndexQueries | None]:
        x = self._query_input(normed, context)
        of_heads = self._heads(x, cos, sin, context)
        if self.indexer is None:
            return *of_heads, None
        return *of_heads, self.indexer.queries(x, normed, cos, sin, context)

    def _cached(
        self, normed: jax.Array, cos: jax.Array, sin: jax.Array, context: LayerContext
    ) -> tuple[jax.Array | None, jax.Array | None]:
        latents = super()._cached(normed, cos, sin, context)
        if self.indexer is None:
            return latents, None
        return latents, self.indexer.keys(normed, cos, sin, context)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ChoiceCarry(Carry):
    """The residual stream, and the tokens that the last index has chosen."""

    chosen: jax.Array  # i32[num_tokens, index_top_k], as `pallas_kernels.index_top_k` returns it

    @classmethod
    def before_layers(cls, carry: Carry, index_top_k: int) -> "ChoiceCarry":
        """The input of the first layer, without chosen tokens. That layer has an index."""
        shape = (carry.hidden.shape[0], index_top_k)
        return cls(hidden=carry.hidden, chosen=jnp.full(shape, NO_POSITION, jnp.int32))


class ChoiceSharingLayer(PreNormLayer):
    """A layer with `IndexedLatentAttention` that passes the choice of tokens on."""

    def __call__(
        self, carry: ChoiceCarry, pages: Pages, context: LayerContext
    ) -> tuple[ChoiceCarry, Pages]:
        attended, chosen, pages = self.self_attn.attend_to_chosen(
            *(carry.hidden, context.kept(carry.chosen), pages, context), norm=self.input_layernorm
        )
        hidden = context.of_kept().by_token(self._add_parts, context.kept(carry.hidden), attended)
        return replace(carry, hidden=hidden, chosen=chosen), pages
