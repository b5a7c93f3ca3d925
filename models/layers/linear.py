"""Matrix products and the `Linear` and `Embedding` layers: weights of float are [in, out]."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from models.layers.chosen_kernel import ChosenKernel, Kernel, multiply_each
from models.layers.few_rows import is_worth_a_loop, multiply_few_rows
from models.weight_rule import Source, SplitAxis, WeightRule

INT8_MAX = 127
# XLA:CPU multiplies fewer rows of bfloat16 or int8 than this ten times as slowly as so many.
MIN_ROUNDED_ROWS = 8


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


def dot_int32(
    x: jax.Array,  # i8[num_tokens, in_features]
    kernel: jax.Array,  # i8[out_features, in_features]
) -> jax.Array:  # i32[num_tokens, out_features]
    """Multiplies in integers.

    What is summed lies together in both, as instructions for int8 want it. With [in, out] YNNPACK
    reorders the kernel and sums its columns at each call: products of 512 by 1,536 take 1.2 to
    1.3 times as long with 8 rows, 1.1 with 64, and about as long with 256 (one core with AVX-512
    VNNI, JAX 0.12.0.1).
    """
    return lax.dot_general(
        x,
        kernel,
        dimension_numbers=(((1,), (1,)), ((), ())),
        preferred_element_type=jnp.int32,
    )


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
    costs several times the product on a CPU.

    The kernel may be of fewer bits than x (`models/loading/product_dtype.py`): then x is rounded to
    them as well, in int8 each token to 255 steps of its own largest number, and a kernel of int8
    is [out, in] (`dot_int32`). Or it may be a tuple of panels of its columns
    (`models/loading/column_panels.py`). On one core of a CPU it may multiply few tokens in loops
    (`models/layers/few_rows.py`). In a loop over layers it is a `ChosenKernel` of such.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        axes: tuple[SplitAxis | None, SplitAxis | None] = (None, None),
        use_bias: bool = False,
        dtype: jnp.dtype,
    ) -> None:
        """Makes the layer with weights to be filled in.

        Args:
            axes: What a mesh splits, of inputs and of outputs; as `WeightRule.axes`.
        """
        self.axes = axes
        self.kernel = nnx.Param(jnp.zeros((in_features, out_features), dtype))
        # f32[out_features], what an output of an int8 kernel is to be multiplied by.
        self.kernel_scale: nnx.Param | None = None
        self.bias = nnx.Param(jnp.zeros((out_features,), dtype)) if use_bias else None
        # Most tokens, above one, that a kernel of float32 is multiplied with in loops; 0 is never.
        self.max_looped_tokens = 0

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`."""
        in_features, out_features = self.kernel.get_value().shape
        weight = Source(name=f"{name}.weight", shape=(out_features, in_features))
        rules = {"kernel": WeightRule(sources=(weight,), layout="matrix", axes=self.axes)}
        if self.bias is not None:
            bias = Source(name=f"{name}.bias", shape=(out_features,))
            # A bias after a sum over devices is added once, by everyone.
            rules["bias"] = WeightRule(sources=(bias,), layout="vector", axes=self.axes[1:])
        return rules

    def __call__(
        self,
        x: jax.Array,  # f[num_tokens, in_features]
    ) -> jax.Array:  # f[num_tokens, out_features]
        (parts,) = parts_of_each([self], [x])
        return side_by_side(parts)

    def product(
        self,
        x: jax.Array,  # f[num_tokens, in_features]
    ) -> jax.Array:  # f32[num_tokens, out_features]
        """`x @ kernel` alone."""
        (products,) = _products_of_each([self], [x])
        return side_by_side(products)

    @property
    def kernel_dtype(self) -> jnp.dtype:
        kernel = self.kernel.get_value()
        if isinstance(kernel, ChosenKernel):
            kernel = kernel.kernels[0]
        return kernel[0].dtype if isinstance(kernel, tuple) else kernel.dtype

    def multiply(
        self,
        x: jax.Array,  # [num_tokens, in_features], of the kernel's dtype
        kernel: Kernel,  # as its own
    ) -> list[jax.Array]:  # f32 or i32[num_tokens, columns of a panel]
        """Sums of products alone, one array a panel."""
        panels = kernel if isinstance(kernel, tuple) else (kernel,)
        if x.dtype == jnp.int8:
            return [dot_int32(x, panel) for panel in panels]
        if self._is_looped(x):
            return multiply_few_rows(x, panels)
        return [dot_float32(x, panel) for panel in panels]

    def _is_looped(self, x: jax.Array) -> bool:
        num_tokens, in_features = x.shape
        has_few = 1 < num_tokens <= self.max_looped_tokens
        return has_few and x.dtype == jnp.float32 and is_worth_a_loop(num_tokens, in_features)


def parts_of_each(
    linears: Sequence[Linear],
    xs: Sequence[jax.Array],  # f[num_tokens, in_features] for each
) -> list[list[jax.Array]]:  # f[num_tokens, columns of a panel]
    """What each makes of its x, in pieces, one a panel; all are of one layer.

    What works on each number alone needs the pieces not joined. Layers of one model that have as
    many `out_features` have the same pieces.
    """
    products = _products_of_each(linears, xs)
    return [
        [part.astype(x.dtype) for part in _add_bias(linear, parts)]
        for linear, x, parts in zip(linears, xs, products, strict=True)
    ]


def _products_of_each(
    linears: Sequence[Linear],
    xs: Sequence[jax.Array],  # f[num_tokens, in_features] for each
) -> list[list[jax.Array]]:  # f32[num_tokens, columns of a panel]
    rounded = [_round(x, linear.kernel_dtype) for linear, x in zip(linears, xs, strict=True)]
    sums = multiply_each(
        [linear.multiply for linear in linears],
        [x for x, _ in rounded],
        [linear.kernel.get_value() for linear in linears],
    )
    return [
        [_scale_sums(linear, part[: x.shape[0]], x_scale) for part in parts]
        for linear, x, parts, (_, x_scale) in zip(linears, xs, sums, rounded, strict=True)
    ]


def _round(
    x: jax.Array,  # f[num_tokens, in_features]
    dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array | None]:  # dtype[>= num_tokens, in_features], f32[num_tokens]
    """x as a kernel of that dtype is multiplied with; in int8 also the steps of its tokens."""
    if x.dtype == dtype:
        return x, None
    if dtype == jnp.int8:
        x_q, x_scale = round_to_int8(x, axis=1)
        return _at_least_min_rows(x_q), x_scale
    return _at_least_min_rows(x.astype(dtype)), None


def _scale_sums(
    linear: Linear,
    sums: jax.Array,  # f32 or i32[num_tokens, columns of a panel]
    x_scale: jax.Array | None,  # f32[num_tokens]
) -> jax.Array:  # f32[num_tokens, columns of a panel]
    if x_scale is None:
        return sums
    return sums.astype(jnp.float32) * x_scale[:, None] * linear.kernel_scale[...]


def _add_bias(
    linear: Linear,
    products: list[jax.Array],  # f32[num_tokens, columns of a panel]
) -> list[jax.Array]:  # the same
    if linear.bias is None:
        return products
    ends = np.cumsum([product.shape[1] for product in products])
    biases = jnp.split(linear.bias[...].astype(jnp.float32), ends[:-1])
    return [product + bias for product, bias in zip(products, biases, strict=True)]


def side_by_side(
    parts: list[jax.Array],  # f[num_tokens, columns of a part]
) -> jax.Array:  # f[num_tokens, columns of all]
    """Joins the columns of `parts_of_each`."""
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


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

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`."""
        weight = Source(name=f"{name}.weight", shape=self.embedding.get_value().shape)
        return {"embedding": WeightRule(sources=(weight,), layout="table", axes=("vocab", None))}

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
