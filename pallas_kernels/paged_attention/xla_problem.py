"""The operands, masks and running softmax that both loops of the plain-JAX body use."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.distance_bias import distance_rows, profiles_by_distance
from pallas_kernels.row_reductions import sum_of_rows
from pallas_kernels.stored_dtype import as_values

# Value of masked logits and of empty running maxima. Finite, because -inf minus -inf is NaN.
MASKED_LOGIT = float(jnp.finfo(jnp.float32).min)


class RunningSoftmax(NamedTuple):
    """A softmax over the keys seen so far. Both sums are scaled by exp(-largest)."""

    largest: jax.Array  # f32[...]
    denominator: jax.Array  # f32[...]
    weighted_values: jax.Array  # f32[..., head_dim]

    def add(
        self,
        logits: jax.Array,  # f32[..., num_keys]
        is_seen: jax.Array,  # bool, of a shape that broadcasts with `logits`
        sum_values: Callable[[jax.Array], jax.Array],
    ) -> "RunningSoftmax":
        """Returns the softmax over these keys too.

        Args:
            sum_values: Takes weights f32[..., num_keys], and returns the sums of the values that
                they weight, f32[..., head_dim].
        """
        largest = jnp.maximum(self.largest, logits.max(axis=-1))
        rescale = jnp.exp(self.largest - largest)
        # Until a row has seen a key, all its logits are equal, and exp alone would give 1.
        weights = jnp.where(is_seen, jnp.exp(logits - largest[..., None]), 0.0)
        return RunningSoftmax(
            largest,
            self.denominator * rescale + sum_of_rows(weights),
            self.weighted_values * rescale[..., None] + sum_values(weights),
        )

    def result(self) -> tuple[jax.Array, jax.Array]:  # f32[..., head_dim], f32[...]
        """The attention output and lse; zero and -inf where nothing was seen."""
        seen = self.denominator > 0
        denominator = jnp.where(seen, self.denominator, 1.0)
        lse = jnp.where(seen, self.largest + jnp.log(denominator), -jnp.inf)
        return self.weighted_values / denominator[..., None], lse


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionProblem:
    """The arguments of one call of the op. Query heads are grouped by KV head."""

    q: jax.Array  # f[num_tokens, num_kv_heads, group_size, head_dim]
    kv_cache: jax.Array  # [num_rows, 2 * num_blocks, num_kv_heads, block_size, head_dim]
    row: jax.Array  # i32[]
    block_tables: jax.Array  # i32[num_reqs, max_blocks_per_req]
    seq_lens: jax.Array  # i32[num_reqs]
    query_start_loc: jax.Array  # i32[num_reqs + 1]
    scale: float
    key_limits: jax.Array | None = None  # i32[num_tokens]
    is_causal: bool = True
    sliding_window: int | None = None
    chunk_size: int | None = None
    soft_cap: float | None = None
    sinks: jax.Array | None = None  # f[num_kv_heads, group_size]
    alibi_slopes: jax.Array | None = None  # f[num_kv_heads, group_size]
    kv_dtype: jnp.dtype | None = None  # what a cache of uint16 holds
    # f[num_tokens, num_kv_heads, group_size, num_profiles]
    distance_factors: jax.Array | None = None
    profiles_by_distance: jax.Array | None = None  # f32[num_distances + 1, num_profiles]

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.kv_cache.shape[3]

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self.kv_cache.shape[1] // 2

    @property
    def out_shape(self) -> tuple[int, ...]:
        """num_tokens, num_kv_heads, group_size, and the width of a value."""
        return self.q.shape

    def num_query(self) -> jax.Array:  # i32[num_reqs]
        """Query tokens of each request; none for a request whose sequence is empty."""
        num_query = self.query_start_loc[1:] - self.query_start_loc[:-1]
        return jnp.where(self.seq_lens > 0, num_query, 0)

    def last_seen(
        self, token_idx: jax.Array, position: jax.Array
    ) -> jax.Array:  # i32, the shape of both
        """The last key that each token sees: its own position, or the last one below its limit.

        Args:
            token_idx: In [0, num_tokens).
            position: Of each token if its request's query tokens are the last of its keys.
        """
        return position if self.key_limits is None else rows_at(self.key_limits, token_idx) - 1

    @property
    def sees_all_before(self) -> bool:
        """Whether a token sees every position before its own."""
        return self.sliding_window is None and self.chunk_size is None

    def first_seen(self, query_position: jax.Array) -> jax.Array:
        """The leftmost position that a token at `query_position` may see."""
        if self.chunk_size is not None:
            return query_position // self.chunk_size * self.chunk_size
        if self.sliding_window is not None:
            return jnp.maximum(query_position - self.sliding_window + 1, 0)
        return jnp.zeros_like(query_position)

    def gather_blocks(
        self, block_ids: jax.Array, is_real: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Reads the keys and the values of blocks of the row.

        Where `is_real` is False, block 0 is read, whatever the id. K and V are two gathers: on the
        CPU, one gather of whole pages that are split afterwards is slower. Row and block are two
        indices of one gather. Slicing the row out first would copy the row. With the two axes
        merged, XLA on the CPU copies a cache of one KV head that the same program writes.
        """
        readable_ids = jnp.where(is_real, block_ids, 0)
        stored = (rows_at(self.kv_cache, self.row, 2 * readable_ids + part) for part in (0, 1))
        k, v = (as_values(x, self.kv_dtype) for x in stored)
        return k, v

    def as_weights(self, weights: jax.Array) -> jax.Array:
        """Casts weights for the product with values, to the wider one of q's dtype and the cache's.

        A 16-bit model then multiplies 16-bit numbers, and float32 queries keep their precision if
        the cache is narrower.
        """
        return weights.astype(jnp.promote_types(self.q.dtype, self.kv_dtype or self.kv_cache.dtype))

    def factors_at(
        self,
        token_idx: jax.Array,  # i32[n], in [0, num_tokens)
    ) -> jax.Array | None:  # f32[n, num_kv_heads, group_size, num_profiles]
        """The factors of tokens; None if the call has none."""
        if self.distance_factors is None:
            return None
        return rows_at(self.distance_factors, token_idx).astype(jnp.float32)

    def biases_at(
        self,
        distance: jax.Array,  # i32[...], the position of each key minus that of its query
    ) -> jax.Array:  # f32[..., num_profiles]
        """The profiles' biases of keys. The factors of their queries mix these."""
        num_distances = self.profiles_by_distance.shape[0] - 1
        return rows_at(self.profiles_by_distance, distance_rows(distance, num_distances))

    def logits(
        self,
        products: jax.Array,
        is_seen: jax.Array,
        distance: jax.Array,
        head_axis: int,
        bias: jax.Array | None = None,
    ) -> jax.Array:
        """Scales, caps, biases and masks products of queries and keys, in this order.

        Args:
            distance: i32, the position of each key minus that of its query. It broadcasts like
                `is_seen`.
            bias: f32, of the same shape as `products`. ALiBi's bias is added in any case.
        """
        logits = products * self.scale
        if self.soft_cap is not None:
            logits = self.soft_cap * jnp.tanh(logits / self.soft_cap)
        if bias is not None:
            logits += bias
        if self.alibi_slopes is not None:
            trailing = (1 for _ in range(products.ndim - 2 - head_axis))
            slopes = self.alibi_slopes.astype(jnp.float32)
            logits += slopes.reshape(*slopes.shape, *trailing) * distance
        return jnp.where(is_seen, logits, MASKED_LOGIT)

    def by_query_head(
        self,
        out: jax.Array,  # f32[num_tokens, num_kv_heads, group_size, value_dim]
        lse: jax.Array,  # f32[num_tokens, num_kv_heads, group_size]
    ) -> tuple[jax.Array, jax.Array]:  # f[num_tokens, num_q_heads, value_dim], f32[num_tokens, ...]
        """The results of a body, in q's dtype."""
        lse = lse.reshape(self.q.shape[0], -1)
        return out.reshape(*lse.shape, -1).astype(self.q.dtype), lse

    def empty_softmax(self, leading: tuple[int, ...], trailing: tuple[int, ...]) -> RunningSoftmax:
        """A softmax f32[*leading, num_kv_heads, group_size, *trailing] that has seen no key yet.

        With sinks, it contains one key per head: the sink's logit, with a value vector of zeros.
        """
        *heads, value_dim = self.out_shape[1:]
        shape = (*leading, *heads, *trailing)
        weighted_values = jnp.zeros((*shape, value_dim), jnp.float32)
        if self.sinks is None:
            largest = jnp.full(shape, MASKED_LOGIT, jnp.float32)
            return RunningSoftmax(largest, jnp.zeros(shape, jnp.float32), weighted_values)
        sinks = jnp.maximum(self.sinks.astype(jnp.float32), MASKED_LOGIT)
        largest = jnp.broadcast_to(sinks.reshape(*heads, *(1 for _ in trailing)), shape)
        return RunningSoftmax(largest, jnp.ones(shape, jnp.float32), weighted_values)


def make_problem(
    q: jax.Array,  # f[num_tokens, num_q_heads, head_dim]
    kv_cache: jax.Array,
    row: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    *,
    sinks: jax.Array | None,  # f[num_q_heads]
    alibi_slopes: jax.Array | None,  # f32[num_q_heads]
    distance_factors: jax.Array | None = None,  # f[num_tokens, num_q_heads, num_profiles]
    distance_profiles: jax.Array | None = None,  # f[num_profiles, num_distances]
    **rules: object,
) -> AttentionProblem:
    """Makes the problem of a call from the arguments of a body, except `max_query_len`."""
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = kv_cache.shape[2]
    heads = (num_kv_heads, num_q_heads // num_kv_heads)
    if distance_factors is not None:
        rules["distance_factors"] = distance_factors.reshape(num_tokens, *heads, -1)
        rules["profiles_by_distance"] = profiles_by_distance(distance_profiles)
    return AttentionProblem(
        q=q.reshape(num_tokens, *heads, head_dim),
        kv_cache=kv_cache,
        row=row,
        block_tables=block_tables,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        sinks=None if sinks is None else sinks.reshape(heads),
        alibi_slopes=None if alibi_slopes is None else alibi_slopes.reshape(heads),
        **rules,
    )


def rows_at(array: jax.Array, *indices: jax.Array) -> jax.Array:
    """`array[indices]` for indices that are in bounds and not negative.

    Plain indexing would add kernels that convert negative indices.
    """
    return array.at[indices].get(mode="promise_in_bounds", wrap_negative_indices=False)


def running_totals(counts: jax.Array) -> jax.Array:  # i32[n] -> i32[n]
    """`jnp.cumsum` in one kernel of n * n additions. XLA would make five kernels for n = 64."""
    idx = jnp.arange(counts.shape[0], dtype=jnp.int32)
    return jnp.where(idx <= idx[:, None], counts, 0).sum(axis=1, dtype=jnp.int32)


def product_f32(subscripts: str, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """A product accumulated in float32; float32 operands are not rounded (to TF32) on the way."""
    dtype = jnp.promote_types(lhs.dtype, rhs.dtype)
    return jnp.einsum(
        subscripts,
        lhs.astype(dtype),
        rhs.astype(dtype),
        precision=lax.Precision.HIGHEST if dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
