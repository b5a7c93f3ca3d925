"""The `Linear` and `Embedding` layers."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from models.forward.kernel_settings import PLAIN_XLA, KernelSettings
from models.forward.layer_context import LayerContext
from models.head_split import HeadSplit
from models.layers.head_linear import HeadLinear
from models.layers.layer_stack import InStack
from models.layers.product import dot_float32
from models.stored_kernels.stored_kernel import StoredKernel
from models.stored_kernels.use_kernel import multiply
from models.weight_rule import Source, SplitAxis, WeightRule


class Linear(nnx.Module):
    """`x @ kernel + bias`, summed in float32 and returned in x's dtype.

    The kernel is the transpose of the checkpoint's weight: the loader turns it once, because a
    product with the transpose of a float kernel takes several times as long on a CPU. The loader
    may replace the array by a `StoredKernel`, or by an `InStack` with the kernels of other layers.
    In a loop over layers it is a `ChosenKernel`, or an `InStack`.

    Attributes:
        name: The path of the layer within its decoder layer, such as "self_attn.q_proj", or within
            the model. The loader sets it (`name_linears`).
    """

    chosen_in_place: ClassVar[tuple[str, ...]] = ("kernel",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        axes: tuple[SplitAxis | None, SplitAxis | None] = (None, None),
        heads: HeadSplit | None = None,
        use_bias: bool = False,
        dtype: jnp.dtype,
    ) -> None:
        """Makes the layer with weights to be filled in.

        Args:
            axes: What a mesh splits, of inputs and of outputs; as `WeightRule.axes`.
            heads: Of the outputs; as `WeightRule.heads`.
        """
        self.name = ""
        self.axes = axes
        self.heads = heads
        self.kernel = nnx.Param(jnp.zeros((in_features, out_features), dtype))
        self.bias = nnx.Param(jnp.zeros((out_features,), dtype)) if use_bias else None

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`."""
        in_features, out_features = self.kernel.get_value().shape
        weight = Source(name=f"{name}.weight", shape=(out_features, in_features))
        rules = {
            "kernel": WeightRule(
                sources=(weight,), layout="matrix", axes=self.axes, heads=self.heads
            )
        }
        if self.bias is not None:
            bias = Source(name=f"{name}.bias", shape=(out_features,))
            # If the product is a sum over devices, each device adds the whole bias after the sum.
            rules["bias"] = WeightRule(
                sources=(bias,), layout="vector", axes=self.axes[1:], heads=self.heads
            )
        return rules

    def __call__(
        self,
        x: jax.Array,  # f[num_rows, in_features], of the tokens of `context.of_rows`
        context: LayerContext,
    ) -> jax.Array:  # f[num_rows, out_features]
        y = context.kernels.split_last(self.product(x, context.kernels), self.axes[1])
        if self.bias is not None:
            y += self.bias[...].astype(jnp.float32)
        return context.changed_linear(self.name, x, y.astype(x.dtype))

    def product(
        self,
        x: jax.Array,  # f[num_rows, in_features]
        kernels: KernelSettings = PLAIN_XLA,
    ) -> jax.Array:  # f32[num_rows, out_features]
        """`x @ kernel` alone."""
        value = self.kernel.get_value()
        if isinstance(value, InStack):
            return value.stack.multiply_one(x, value.layer_idx, kernels)
        return multiply(x, value, kernels)


def name_linears(model: nnx.Module) -> None:
    """Sets the names of `Linear` and `HeadLinear` in a model with decoder layers in `layers`."""
    for path, module in nnx.iter_modules(model):
        if isinstance(module, (Linear, HeadLinear)):
            parts = path[2:] if path[0] == "layers" else path
            module.name = ".".join(map(str, parts))


class Embedding(nnx.Module):
    """Token id to row, times `scale`; the table is f[vocab, hidden].

    The scale is rounded to the table's dtype first, as Hugging Face does: 55.43 is 55.5 in
    bfloat16.

    Attributes:
        is_turned: The table is stored as its transpose, f[hidden, vocab] (`turn`). The loader may
            replace this array by a `StoredKernel`.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: jnp.dtype, scale: float = 1.0
    ) -> None:
        self.embedding = nnx.Param(jnp.zeros((vocab_size, hidden_size), dtype))
        self.scale = scale
        self.dtype = jnp.dtype(dtype)
        self.is_turned = False

    def turn(self) -> None:
        """Makes an embedding without weights one whose table is stored as its transpose."""
        table = self.embedding.get_value()
        self.embedding.set_value(jax.ShapeDtypeStruct(table.shape[::-1], table.dtype))
        self.is_turned = True

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`."""
        shape = self.embedding.get_value().shape
        if not self.is_turned:
            weight = Source(name=f"{name}.weight", shape=shape)
            rule = WeightRule(sources=(weight,), layout="table", axes=("vocab", None))
        else:
            weight = Source(name=f"{name}.weight", shape=shape[::-1])
            rule = WeightRule(sources=(weight,), layout="turned_table", axes=(None, "vocab"))
        return {"embedding": rule}

    def __call__(
        self,
        token_ids: jax.Array,  # i32[num_tokens], in [0, vocab)
    ) -> jax.Array:  # f[num_tokens, hidden]
        rows = self._rows(token_ids)
        return rows if self.scale == 1.0 else rows * jnp.asarray(self.scale, rows.dtype)

    def _rows(self, token_ids: jax.Array) -> jax.Array:
        table = self.embedding.get_value()
        if isinstance(table, StoredKernel):
            return table.columns(token_ids, self.dtype).T
        places = table.at[:, token_ids] if self.is_turned else table.at[token_ids]
        rows = places.get(mode="promise_in_bounds", wrap_negative_indices=False)
        return rows.T if self.is_turned else rows

    def attend(
        self,
        hidden: jax.Array,  # f[num_logits, hidden]
        kernels: KernelSettings = PLAIN_XLA,
    ) -> jax.Array:  # f32[num_logits, vocab]
        """Scores every token with its embedding, without `scale`, as a tied vocabulary head."""
        table = self.embedding.get_value()
        return multiply(hidden, table, kernels) if self.is_turned else dot_float32(hidden, table.T)
