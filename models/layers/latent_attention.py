"""`LatentAttention`: multi-head latent attention (MLA), computed in the absorbed form."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.cache.format import Pages
from models.config.attention_config import SELF_ATTENTION
from models.config.latent_config import LatentAttentionConfig
from models.forward.layer_context import LayerContext
from models.layers.attention import split_heads
from models.layers.head_linear import HeadLinear
from models.layers.latent_attend import latent_attend, write_vectors
from models.layers.linear import Linear
from models.layers.query_chunks import chunk_rows, map_query_chunks
from models.layers.rms_norm import RMSNorm
from models.layers.rotary import apply_rotary, apply_rotary_to_neighbors
from models.layers.self_attention import Norm
from models.weight_rule import Source, WeightRule

# Arrays with a row for each token at hand.
RowArrays = jax.Array | None | tuple[jax.Array | tuple[jax.Array, ...] | None, ...]


class LatentAttention(nnx.Module):
    """Attention whose keys and values are projections of one cached latent per token.

    The checkpoint's `kv_b_proj` expands a latent to the keys and values of all heads. Its two
    halves are separate parameters here. `k_up` is applied to queries and `v_up` to the output,
    so that keys and values are never expanded.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.
    """

    def __init__(
        self,
        config: LatentAttentionConfig,
        *,
        cache_name: str = SELF_ATTENTION,
        dtype: jnp.dtype,
    ) -> None:
        """Makes the layer with weights to be filled in.

        Args:
            cache_name: The cache's local name in the layer, one of `config.formats`.
        """
        num_heads, latent_dim = config.num_q_heads, config.latent_dim
        q_width = num_heads * config.head_dim
        bias = {"use_bias": config.qkv_bias, "dtype": dtype}
        if config.q_latent_dim is None:
            self.q_proj = Linear(config.hidden_size, q_width, axes=(None, "heads"), dtype=dtype)
        else:
            self.q_a_proj = Linear(config.hidden_size, config.q_latent_dim, **bias)
            self.q_a_layernorm = RMSNorm(config.q_latent_dim, eps=config.norm_eps, dtype=dtype)
            self.q_b_proj = Linear(config.q_latent_dim, q_width, axes=(None, "heads"), dtype=dtype)
        if config.kv_layer_idx is None:
            cached_dim = latent_dim + config.rope_dim
            self.kv_a_proj_with_mqa = Linear(config.hidden_size, cached_dim, **bias)
            self.kv_a_layernorm = RMSNorm(latent_dim, eps=config.norm_eps, dtype=dtype)
        self.k_up = HeadLinear(num_heads, config.nope_dim, latent_dim, dtype=dtype)
        self.v_up = HeadLinear(num_heads, latent_dim, config.value_head_dim, dtype=dtype)
        self.o_proj = Linear(
            num_heads * config.value_head_dim,
            config.hidden_size,
            axes=("heads", None),
            use_bias=config.out_bias,
            dtype=dtype,
        )
        self.config = config
        self.cache_name = cache_name

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """The rules of `k_up` and `v_up`: see `HasWeights.weight_rules`."""
        config = self.config
        rows_per_head = config.nope_dim + config.value_head_dim
        packed = Source(
            name=f"{name}.kv_b_proj.weight",
            shape=(config.num_q_heads * rows_per_head, config.latent_dim),
        )

        def rows(arrays: Sequence[np.ndarray], part: slice) -> np.ndarray:
            by_head = arrays[0].reshape(config.num_q_heads, rows_per_head, config.latent_dim)
            return by_head[:, part]

        rule = functools.partial(
            WeightRule, sources=(packed,), layout="heads", axes=("heads", None, None)
        )
        of_keys, of_values = slice(config.nope_dim), slice(config.nope_dim, None)
        # A key is a product of rows with a latent, so queries are multiplied by the transpose.
        return {
            "k_up.kernel": rule(combine=lambda arrays: rows(arrays, of_keys).swapaxes(1, 2)),
            "v_up.kernel": rule(combine=lambda arrays: rows(arrays, of_values)),
        }

    def __call__(
        self, hidden: jax.Array, pages: Pages, context: LayerContext, *, norm: Norm
    ) -> tuple[jax.Array, Pages]:
        """See `SelfAttention.__call__`."""
        queries, latents = self.project_in(hidden, context, norm=norm)
        pages = write_vectors(latents, pages, context, cache_name=self.cache_name)
        attend = functools.partial(
            latent_attend, self.config, pages=pages, context=context, cache_name=self.cache_name
        )
        return self.attend_with(attend, queries, context), pages

    def attend_with(
        self,
        attend: Callable[..., jax.Array],
        queries: tuple[jax.Array, ...],
        context: LayerContext,
    ) -> jax.Array:
        """Calls `attend`, in a large step chunk by chunk.

        Absorbed queries and their output are several times as large as the queries and values that
        they stand for. In chunks, `k_up` and `v_up` are applied to few rows at a time.

        Args:
            attend: Takes the absorbed queries, the other arrays of `queries`, and `seq_lens` and
                `query_start_loc` of the rows. It returns f[num_rows, num_q_heads, latent_dim].
            queries: The queries of `_queries`, and further arrays with a row for each of them.

        Returns:
            The input of `project_out`.
        """
        size = self._chunk_rows(context)
        seq_lens = context.cache(self.cache_name).seq_lens
        if size is None:
            return attend(*queries, seq_lens, context.query_start_loc)

        def attend_chunk(
            queries: tuple[jax.Array, ...],
            seq_lens: jax.Array,
            query_start_loc: jax.Array,
            context: LayerContext,
        ) -> jax.Array:
            q_nope, *others = queries
            absorbed = self.k_up(q_nope, context)
            return self.v_up(attend(absorbed, *others, seq_lens, query_start_loc), context)

        q_nope = queries[0]
        out = jnp.zeros((*q_nope.shape[:2], self.config.value_head_dim), q_nope.dtype)
        return map_query_chunks(attend_chunk, queries, out, seq_lens, context.of_kept(), size=size)

    def _chunk_rows(self, context: LayerContext) -> int | None:
        """Rows of a chunk of the step's queries; None: all rows at once."""
        config = self.config
        kernels = context.kernels
        own_heads = config.num_q_heads // kernels.num_shards * kernels.num_context_ranks
        return chunk_rows(context.num_queries, own_heads * (config.latent_dim + config.rope_dim))

    def project_in(
        self,
        hidden: jax.Array,  # f[num_tokens, hidden]
        context: LayerContext,
        *,
        norm: Norm,
    ) -> tuple[RowArrays, RowArrays]:
        """Computes the arrays of `_queries` for the rows that attend, and of `_cached` for all."""
        cos_sin = context.cos_sin[self.config.rotary]

        def project_all(
            hidden: jax.Array, cos: jax.Array, sin: jax.Array, context: LayerContext
        ) -> tuple[RowArrays, RowArrays]:
            arguments = (norm(hidden), cos, sin, context)
            return self._queries(*arguments), self._cached(*arguments)

        def project_cached(
            hidden: jax.Array, cos: jax.Array, sin: jax.Array, context: LayerContext
        ) -> RowArrays:
            return self._cached(norm(hidden), cos, sin, context)

        if not context.drops_rows:
            return context.by_token(project_all, hidden, *cos_sin)
        cached = context.by_token(project_cached, hidden, *cos_sin)
        normed = norm(context.kept(hidden))
        return self._queries(normed, *map(context.kept, cos_sin), context.of_kept()), cached

    def project_out(
        self,
        attended: jax.Array,  # f[num_queries, num_q_heads, latent_dim], or values of chunks
        context: LayerContext,
    ) -> jax.Array:  # f[num_queries, hidden]
        values = self.expand(attended, context)
        return self.o_proj(values.reshape(values.shape[0], -1), context)

    def expand(
        self, attended: jax.Array, context: LayerContext
    ) -> jax.Array:  # f[num_queries, num_q_heads, value_head_dim]
        """The values of the result of `attend_with`."""
        is_expanded = self._chunk_rows(context) is not None
        return attended if is_expanded else self.v_up(attended, context)

    def _queries(
        self,
        normed: jax.Array,  # f[num_rows, hidden]
        cos: jax.Array,  # f32[num_rows, rotary_dim // 2]
        sin: jax.Array,  # f32[num_rows, rotary_dim // 2]
        context: LayerContext,
    ) -> tuple[jax.Array, jax.Array]:
        """Absorbed queries f[num_rows, num_q_heads, latent_dim], and f[num_rows, num_q_heads,
        rope_dim]. If they are absorbed chunk by chunk, the first width is nope_dim.
        """
        return self._heads(self._query_input(normed, context), cos, sin, context)

    def _query_input(self, normed: jax.Array, context: LayerContext) -> jax.Array:
        """The queries' latent f[num_rows, q_latent_dim]; `normed` if they have none."""
        if self.config.q_latent_dim is None:
            return normed
        return self.q_a_layernorm(self.q_a_proj(normed, context))

    def _heads(
        self, x: jax.Array, cos: jax.Array, sin: jax.Array, context: LayerContext
    ) -> tuple[jax.Array, jax.Array]:
        """As `_queries`, from the result of `_query_input`."""
        project = self.q_proj if self.config.q_latent_dim is None else self.q_b_proj
        q = split_heads(project(x, context), self.config.head_dim)
        nope_dim = self.config.nope_dim
        q_nope, q_rope = q[..., :nope_dim], self._rotated(q[..., nope_dim:], cos, sin)
        absorbs_later = self._chunk_rows(context) is not None
        return q_nope if absorbs_later else self.k_up(q_nope, context), q_rope

    def _cached(
        self, normed: jax.Array, cos: jax.Array, sin: jax.Array, context: LayerContext
    ) -> jax.Array | None:
        """What the layer caches: None if it reads the latents of an earlier layer."""
        if self.config.kv_layer_idx is not None:
            return None
        return self._latents(normed, cos, sin, context)

    def _latents(
        self, normed: jax.Array, cos: jax.Array, sin: jax.Array, context: LayerContext
    ) -> jax.Array:  # f[num_rows, latent_dim + rotary_dim]
        projected = self.kv_a_proj_with_mqa(normed, context)
        latent_dim = self.config.latent_dim
        latent = self.kv_a_layernorm(projected[:, :latent_dim])
        rope_key = self._rotated(projected[:, None, latent_dim:], cos, sin)[:, 0]
        return jnp.concatenate([latent, rope_key], axis=-1)

    def _rotated(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        turn = apply_rotary_to_neighbors if self.config.turns_neighbors else apply_rotary
        return turn(x, cos, sin)
