"""Matrix products and the `Linear` and `Embedding` layers: weights are stored [in, out]."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax


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


class Linear(nnx.Module):
    """`x @ kernel + bias`, summed in float32 and returned in x's dtype.

    A checkpoint stores the transpose; the loader turns it once, since an [out, in] kernel costs
    several times the product on a CPU. A mesh shards `out_features` of q, k, v, gate and up, and
    `in_features` of o and down.
    """

    def __init__(
        self, in_features: int, out_features: int, *, use_bias: bool, dtype: jnp.dtype
    ) -> None:
        self.kernel = nnx.Param(jnp.zeros((in_features, out_features), dtype))
        self.bias = nnx.Param(jnp.zeros((out_features,), dtype)) if use_bias else None

    def __call__(
        self,
        x: jax.Array,  # f[num_tokens, in_features]
    ) -> jax.Array:  # f[num_tokens, out_features]
        out = dot_float32(x, self.kernel[...])
        if self.bias is not None:
            out = out + self.bias[...].astype(jnp.float32)
        return out.astype(x.dtype)


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
        rows = self.embedding[...][token_ids]
        return rows if self.scale == 1.0 else rows * jnp.asarray(self.scale, rows.dtype)

    def attend(
        self,
        hidden: jax.Array,  # f[num_logits, hidden]
    ) -> jax.Array:  # f32[num_logits, vocab]
        """Scores every token with its own embedding, not scaled: the head where it is tied."""
        return dot_float32(hidden, self.embedding[...].T)
