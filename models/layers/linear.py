"""Matrix products and the `Linear` and `Embedding` layers: weights of float are [in, out]."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

INT8_MAX = 127
# XLA:CPU multiplies fewer rows of bfloat16 or int8 than this ten times as slowly as so many.
MIN_ROUNDED_ROWS = 8
# Most numbers in the copies of x that panels are multiplied with at once: 16 MiB.
MAX_COPIED_NUMBERS = 2**22


def dot_float32(
    x: jax.Array,  # f[num_tokens, in_features]
    kernel: jax.Array,  # f[in_features, out_features], same dtype as x
) -> jax.Array:  # f32[num_tokens, out_features]
    """Multiplies with float32 sums.

    Float32 inputs are multiplied as such: a GPU would otherwise round them to TF32 and lose 13 of
    23 bits. 16-bit inputs are exact in the product and need only the wide sum.
    """
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, kernel, precision=precision, preferred_element_type=jnp.float32)


def dot_panels(
    x: jax.Array,  # f32[num_tokens, in_features]
    panels: jax.Array,  # f32[num_panels, in_features, panel_width]
) -> jax.Array:  # f32[num_tokens, num_panels * panel_width]
    """`dot_float32` with a kernel that lies in panels of its columns.

    XLA:CPU multiplies all panels at once with a copy of x for each. Where these are many numbers,
    panels take turns, and each is copied instead. With a head of 1,024 by 151,936, 8 to 64 tokens
    then take 0.7 to 0.85 of the time, and 1 MB instead of 42 to 334; with one of 1,024 by 32,768,
    64 take 0.7 to 0.9 of it and 48 1.1, but 16 to 32, which are fewer numbers, would take 1.0 to
    1.2 (one core with AVX2, JAX 0.10.2).
    """
    num_panels = panels.shape[0]
    if num_panels * x.size > MAX_COPIED_NUMBERS:
        return _dot_panels_in_turn(x, panels)
    out = lax.dot_general(
        jnp.broadcast_to(x, (num_panels, *x.shape)),
        panels,
        dimension_numbers=(((2,), (1,)), ((0,), (0,))),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return out.transpose(1, 0, 2).reshape(x.shape[0], -1)


def _dot_panels_in_turn(x: jax.Array, panels: jax.Array) -> jax.Array:
    num_panels, _, width = panels.shape

    def write_columns(panel_idx: jax.Array, out: jax.Array) -> jax.Array:
        columns = dot_float32(x, lax.dynamic_index_in_dim(panels, panel_idx, keepdims=False))
        return lax.dynamic_update_slice(out, columns, (0, panel_idx * width))

    out = jnp.zeros((x.shape[0], num_panels * width), jnp.float32)
    return lax.fori_loop(0, num_panels, write_columns, out)


def dot_rounded(
    x: jax.Array,  # f[num_tokens, in_features]
    kernel: jax.Array,  # bf16[in_features, out_features]
) -> jax.Array:  # f32[num_tokens, out_features]
    """`dot_float32` of x rounded to the kernel's dtype."""
    return dot_float32(_at_least_min_rows(x.astype(kernel.dtype)), kernel)[: x.shape[0]]


def dot_int8(
    x: jax.Array,  # f[num_tokens, in_features]
    kernel: jax.Array,  # i8[out_features, in_features]
    kernel_scale: jax.Array,  # f32[out_features]
) -> jax.Array:  # f32[num_tokens, out_features]
    """Multiplies in integers: each token is rounded to 255 steps of its own largest number.

    What is summed lies together in both, as instructions for int8 want it. With [in, out] YNNPACK
    reorders the kernel and sums its columns at each call: products of 512 by 1,536 take 1.2 to
    1.3 times as long with 8 rows, 1.1 with 64, and about as long with 256 (one core with AVX-512
    VNNI, JAX 0.12.0.1).
    """
    x_q, x_scale = round_to_int8(x, axis=1)
    sums = lax.dot_general(
        _at_least_min_rows(x_q),
        kernel,
        dimension_numbers=(((1,), (1,)), ((), ())),
        preferred_element_type=jnp.int32,
    )
    return sums[: x.shape[0]].astype(jnp.float32) * x_scale[:, None] * kernel_scale


def round_to_int8(
    x: jax.Array,  # f[...]
    *,
    axis: int,
) -> tuple[jax.Array, jax.Array]:  # i8[...], f32[... without axis]
    """The nearest of 255 equal steps between the largest number along `axis` and its negative."""
    scale = jnp.abs(x).max(axis=axis).astype(jnp.float32) / INT8_MAX
    step = jnp.expand_dims(jnp.where(scale > 0, scale, 1.0), axis)
    return jnp.round(x.astype(jnp.float32) / step).astype(jnp.int8), scale


def _at_least_min_rows(x: jax.Array) -> jax.Array:  # [num_tokens, in] -> [>= num_tokens, in]
    return jnp.pad(x, ((0, max(0, MIN_ROUNDED_ROWS - x.shape[0])), (0, 0)))


class Linear(nnx.Module):
    """`x @ kernel + bias`, summed in float32 and returned in x's dtype.

    A checkpoint stores the transpose; the loader turns it once, since an [out, in] kernel of floats
    costs several times the product on a CPU. A mesh shards `out_features` of q, k, v, gate and up,
    and `in_features` of o and down.

    The kernel may be of fewer bits than x (`models/loading/product_dtype.py`): then x is rounded to
    them as well, and a kernel of int8 is [out, in] (`dot_int8`). Or it may lie in panels of columns
    (`models/loading/column_panels.py`).
    """

    def __init__(
        self, in_features: int, out_features: int, *, use_bias: bool, dtype: jnp.dtype
    ) -> None:
        self.kernel = nnx.Param(jnp.zeros((in_features, out_features), dtype))
        # f32[out_features], what an output of an int8 kernel is to be multiplied by.
        self.kernel_scale: nnx.Param | None = None
        self.bias = nnx.Param(jnp.zeros((out_features,), dtype)) if use_bias else None

    def __call__(
        self,
        x: jax.Array,  # f[num_tokens, in_features]
    ) -> jax.Array:  # f[num_tokens, out_features]
        out = self.product(x)
        if self.bias is not None:
            out = out + self.bias[...].astype(jnp.float32)
        return out.astype(x.dtype)

    def product(
        self,
        x: jax.Array,  # f[num_tokens, in_features]
    ) -> jax.Array:  # f32[num_tokens, out_features]
        """`x @ kernel` alone."""
        if self.kernel[...].ndim == 3:
            return dot_panels(x, self.kernel[...])
        if self.kernel_scale is not None:
            return dot_int8(x, self.kernel[...], self.kernel_scale[...])
        if self.kernel[...].dtype != x.dtype:
            return dot_rounded(x, self.kernel[...])
        return dot_float32(x, self.kernel[...])


class Embedding(nnx.Module):
    """Token id to row, times `scale`; the table is f[vocab, hidden].

    The scale is rounded to the table's dtype first, as Hugging Face does: 55.43 is 55.5 in
    bfloat16.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: jnp.dtype, scale: float = 1.0
    ) -> None:
        self.embedding = nnx.Param(jnp.zeros((vocab_size, hidden_size), dtype))
        self.scale = scale

    def __call__(
        self,
        token_ids: jax.Array,  # i32[num_tokens], in [0, vocab)
    ) -> jax.Array:  # f[num_tokens, hidden]
        rows = self.embedding[...].at[token_ids]
        rows = rows.get(mode="promise_in_bounds", wrap_negative_indices=False)
        return rows if self.scale == 1.0 else rows * jnp.asarray(self.scale, rows.dtype)

    def attend(
        self,
        hidden: jax.Array,  # f[num_logits, hidden]
    ) -> jax.Array:  # f32[num_logits, vocab]
        """Scores every token with its own embedding, not scaled: the head where it is tied."""
        return dot_float32(hidden, self.embedding[...].T)
