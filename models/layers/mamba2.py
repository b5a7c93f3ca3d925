"""`Mamba2`: a state space with one decay per head, in place of attention."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import pallas_kernels
from models.cache.format import Pages
from models.cache.state_format import StateFormat
from models.config.fields import read_count
from models.errors import ModelConfigError
from models.forward.kernel_settings import TOKENS_BY_FEATURE
from models.forward.layer_context import LayerContext, LayerState
from models.head_split import HeadRange, HeadSplit, heads_on_each, num_parts
from models.layers.advance_states import advance_heads
from models.layers.linear import Linear
from models.layers.self_attention import Norm
from models.layers.short_convolution import ShortConvolution
from models.weight_rule import Source, WeightRule

# The name of the layer's cache of states.
MAMBA = "mamba"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config:
    """The sizes of a `Mamba2`.

    Args:
        num_groups: Groups of consecutive heads that share what they write into the state and what
            they read it with. Each group's output is normed alone.
        time_step_limit: The smallest and the largest time step of a token.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    kernel_size: int  # of the convolution
    eps: float  # of the norm of the output
    use_bias: bool = False
    use_conv_bias: bool = True
    time_step_limit: tuple[float, float] = (0.0, float("inf"))
    state_dtype: str = "float32"  # in memory

    def __post_init__(self) -> None:
        if self.num_heads % self.num_groups:
            raise ModelConfigError(
                f"config.json: {self.num_groups} groups of Mamba2 do not divide its "
                f"{self.num_heads} heads; expected groups of equal size."
            )

    @property
    def inner(self) -> int:
        """Width of all heads together."""
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: the inputs of the heads, and `b` and `c` of the groups."""
        return self.inner + 2 * self.num_groups * self.state_size

    @property
    def heads_of_layer(self) -> tuple[int, int]:
        return self.num_heads, self.num_groups

    @property
    def inputs(self) -> HeadRange:
        """The entries of all inputs, gates or outputs."""
        return HeadRange(num_heads=self.num_heads, head_dim=self.head_dim)

    @property
    def numbers(self) -> HeadRange:
        """One number for each head."""
        return HeadRange(num_heads=self.num_heads, head_dim=1)

    def split(self, *ranges: HeadRange) -> HeadSplit:
        return HeadSplit(ranges=ranges, heads_of_layer=self.heads_of_layer)

    @property
    def channels(self) -> HeadSplit:
        groups = HeadRange(num_heads=self.num_groups, head_dim=self.state_size)
        return self.split(self.inputs, groups, groups)

    @property
    def projected(self) -> HeadSplit:
        """Gates, the inputs of the convolution, and time steps."""
        return self.split(self.inputs, *self.channels.ranges, self.numbers)

    def on_each_of(self, num_devices: int) -> "Mamba2Config":
        """The heads of one device."""
        parts = num_parts(self.heads_of_layer, num_devices)
        return replace(
            self,
            num_heads=heads_on_each(self.num_heads, parts),
            num_groups=heads_on_each(self.num_groups, parts),
        )

    def format(self) -> StateFormat:
        """The inputs that the next convolution needs, and the state."""
        window = (self.kernel_size - 1, self.num_channels)
        return StateFormat(
            shapes=(window, (self.num_heads, self.head_dim, self.state_size)),
            num_windows=1,
            state_dtype=self.state_dtype,
            step_op="ssd_step",
            heads=((1, self.channels), (0, self.split(self.numbers))),
        )


def check_width(config: Mamba2Config, hf_config: Mapping[str, object], name: str) -> None:
    """Checks that the heads are together as wide as config.json says.

    Args:
        name: The field with the width of all heads as a multiple of the hidden size, by default 2.

    Raises:
        ModelConfigError: They are not.
    """
    expand = read_count(hf_config, name, 2)
    if config.inner != expand * config.hidden_size:
        raise ModelConfigError(
            f"config.json: {config.num_heads} heads of {config.head_dim} in Mamba2 are not "
            f"{name}={expand} times as wide as the hidden size, {config.hidden_size}."
        )


def read_time_step_limit(hf_config: Mapping[str, object]) -> tuple[float, float]:
    """Reads `time_step_limit`: two numbers, by default 0 and infinity.

    Raises:
        ModelConfigError: It is something else.
    """
    limit = hf_config.get("time_step_limit")
    if limit is None:
        return 0.0, float("inf")
    numbers = list(map(_as_float, limit)) if isinstance(limit, list | tuple) else []
    if len(numbers) != 2 or not numbers[0] <= numbers[1]:
        raise ModelConfigError(
            f"config.json: time_step_limit is {limit!r}; expected a smallest and a largest number."
        )
    return numbers[0], numbers[1]


def _as_float(value: object) -> float:
    """The number, or NaN for anything else. transformers 5 writes infinity as a mapping."""
    if isinstance(value, Mapping) and value.get("__float__") == "Infinity":
        return float("inf")
    return float(value) if isinstance(value, int | float) else float("nan")


class _Vectors(NamedTuple):
    """Weights of all heads, or of the heads of one device."""

    conv1d: tuple[jax.Array, jax.Array | None]
    dt_bias: jax.Array  # f[num_heads]
    A_log: jax.Array  # f32[num_heads]
    D: jax.Array  # f[num_heads]


class Mamba2(nnx.Module):
    """A `SelfAttention` whose cache is a state.

    Source: arXiv:2405.21060.
    """

    def __init__(self, config: Mamba2Config, *, dtype: jnp.dtype) -> None:
        """Makes the layer with weights to be filled in."""
        self.config = config
        use_bias = config.use_bias
        self.in_proj = Linear(
            config.hidden_size,
            config.projected.size,
            axes=(None, "heads"),
            heads=config.projected,
            use_bias=use_bias,
            dtype=dtype,
        )
        self.conv1d = ShortConvolution(
            config.num_channels,
            config.kernel_size,
            use_bias=config.use_conv_bias,
            heads=config.channels,
            dtype=dtype,
        )
        self.dt_bias = nnx.Param(jnp.zeros((config.num_heads,), dtype))
        self.A_log = nnx.Param(jnp.zeros((config.num_heads,), jnp.float32))
        self.D = nnx.Param(jnp.zeros((config.num_heads,), dtype))
        self.scale = nnx.Param(jnp.ones((config.inner,), dtype))
        self.out_proj = Linear(
            config.inner, config.hidden_size, axes=("heads", None), use_bias=use_bias, dtype=dtype
        )

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`."""
        numbers = self.config.split(self.config.numbers)
        vectors = {leaf: (f"{name}.{leaf}", numbers) for leaf in ("dt_bias", "A_log", "D")}
        vectors["scale"] = (f"{name}.norm.weight", self.config.split(self.config.inputs))
        return {
            leaf: WeightRule(
                sources=(Source(name=stored, shape=(heads.size,)),),
                layout="vector",
                axes=(None,),
                heads=heads,
            )
            for leaf, (stored, heads) in vectors.items()
        }

    def __call__(
        self,
        hidden: jax.Array,  # f[num_tokens, hidden]
        pages: Pages,
        context: LayerContext,
        *,
        norm: Norm,
    ) -> tuple[jax.Array, Pages]:
        """Returns the input of `project_out`, f[num_queries, inner], and the pages."""
        num_devices = context.kernels.num_shards
        own = self.config.on_each_of(num_devices)
        is_split = self.config.channels.is_split(num_devices)

        def project(hidden: jax.Array, context: LayerContext) -> jax.Array:
            projected = self._project(norm(hidden), context)
            return context.kernels.split_last(projected, "heads" if is_split else None)

        gate, xbc, dt = context.kernels.cut_features(
            context.by_token(project, hidden),
            (own.inner, own.num_channels, own.num_heads),
            [TOKENS_BY_FEATURE] * 3 if is_split else None,
        )
        vectors = _Vectors(self.conv1d.vectors, self.dt_bias[...], self.A_log[...], self.D[...])
        out, pages = advance_heads(
            *(functools.partial(self._advance, own), MAMBA, vectors, (xbc, dt), pages, context),
            is_split=is_split,
        )
        kept = map(context.kept, (out, gate))
        return context.of_kept().by_token(self._gate, *kept), pages

    def project_out(
        self,
        attended: jax.Array,  # f[num_queries, inner]
        context: LayerContext,
    ) -> jax.Array:  # f[num_queries, hidden]
        is_split = self.config.channels.is_split(context.kernels.num_shards)
        attended = context.kernels.split_last(attended, "heads" if is_split else None)
        return self.out_proj(attended, context)

    def _project(self, normed: jax.Array, context: LayerContext) -> jax.Array:
        """Gates, the inputs of the convolution, and time steps."""
        return self.in_proj(normed, context)

    def _advance(
        self,
        config: Mamba2Config,
        vectors: _Vectors,
        arrays: tuple[jax.Array, jax.Array],
        states: tuple[jax.Array, jax.Array],
        state: LayerState,
        context: LayerContext,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:  # f32[num_tokens, inner], and the states
        """The convolution and the scan of its outputs, as `AdvanceHeads`.

        Args:
            config: Counts the heads of `arrays`: all, or those of one device.
        """
        xbc, dt = arrays
        xbc, window = self.conv1d.convolve(vectors.conv1d, xbc, states[0], state, context)
        x, b, c = _heads(xbc, config)
        dt = jax.nn.softplus(dt.astype(jnp.float32) + vectors.dt_bias.astype(jnp.float32))
        dt = jnp.clip(dt, *config.time_step_limit)
        out, scanned = pallas_kernels.ssd_scan(
            *(x * dt[..., None], b, c),
            -jnp.exp(vectors.A_log) * dt,
            states[1],
            state.query_start_loc,
            positions=context.scan_positions,
            state_ends=state.state_ends,
            has_one_token_each=state.has_one_token_each,
            target=context.kernels.target,
        )
        out += vectors.D.astype(jnp.float32)[:, None] * x
        return out.reshape(out.shape[0], -1), (window, scanned)

    def _gate(
        self,
        out: jax.Array,  # f32[num_rows, inner]
        gate: jax.Array,  # f[num_rows, inner]
        context: LayerContext,
    ) -> jax.Array:  # f[num_rows, inner]
        gated = out * jax.nn.silu(gate.astype(jnp.float32))
        groups = gated.reshape(out.shape[0], self.config.num_groups, -1)
        mean = (groups * groups).mean(axis=-1, keepdims=True)
        normed = (groups * jax.lax.rsqrt(mean + self.config.eps)).reshape(out.shape)
        return self.scale[...] * normed.astype(gate.dtype)


def _heads(
    xbc: jax.Array,  # f32[num_tokens, num_channels]
    config: Mamba2Config,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x f32[num_tokens, num_heads, head_dim]; b and c f32[num_tokens, groups, state_size]."""
    width = config.num_groups * config.state_size
    x, b, c = jnp.split(xbc, [config.inner, config.inner + width], axis=1)
    b, c = (y.reshape(y.shape[0], config.num_groups, config.state_size) for y in (b, c))
    return x.reshape(x.shape[0], config.num_heads, config.head_dim), b, c
