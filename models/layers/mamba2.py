"""`Mamba2`: a state space with one decay per head, in place of attention."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

import pallas_kernels
from models.cache.format import Pages
from models.cache.state_format import StateFormat
from models.config.fields import read_count
from models.errors import ModelConfigError
from models.forward.layer_context import LayerContext, LayerState
from models.layers.advance_states import advance_states
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

    def format(self) -> StateFormat:
        """The inputs that the next convolution needs, and the state."""
        window = (self.kernel_size - 1, self.num_channels)
        return StateFormat(
            shapes=(window, (self.num_heads, self.head_dim, self.state_size)),
            num_windows=1,
            state_dtype=self.state_dtype,
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


class Mamba2(nnx.Module):
    """A `SelfAttention` whose cache is a state.

    Source: arXiv:2405.21060.
    """

    def __init__(self, config: Mamba2Config, *, dtype: jnp.dtype) -> None:
        """Makes the layer with weights to be filled in."""
        self.config = config
        width = config.inner + config.num_channels + config.num_heads
        use_bias = config.use_bias
        self.in_proj = Linear(
            config.hidden_size, width, axes=(None, "heads"), use_bias=use_bias, dtype=dtype
        )
        self.conv1d = ShortConvolution(
            config.num_channels, config.kernel_size, use_bias=config.use_conv_bias, dtype=dtype
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
        sources = {
            leaf: Source(name=f"{name}.{leaf}", shape=(self.config.num_heads,))
            for leaf in ("dt_bias", "A_log", "D")
        }
        sources["scale"] = Source(name=f"{name}.norm.weight", shape=(self.config.inner,))
        return {
            leaf: WeightRule(sources=(source,), layout="vector", axes=(None,))
            for leaf, source in sources.items()
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
        config = self.config

        def project(hidden: jax.Array, context: LayerContext) -> jax.Array:
            # The state is whole on each device of a mesh.
            return context.kernels.split_last(self._project(norm(hidden), context), None)

        projected = context.by_token(project, hidden)
        ends = [config.inner, config.inner + config.num_channels]
        gate, xbc, dt = jnp.split(projected, ends, axis=1)
        out, pages = advance_states(self._advance, MAMBA, (xbc, dt), pages, context)
        kept = map(context.kept, (out, gate))
        return context.of_kept().by_token(self._gate, *kept), pages

    def project_out(
        self,
        attended: jax.Array,  # f[num_queries, inner]
        context: LayerContext,
    ) -> jax.Array:  # f[num_queries, hidden]
        attended = context.kernels.split_last(attended, None)
        return self.out_proj(attended, context)

    def _project(self, normed: jax.Array, context: LayerContext) -> jax.Array:
        """Gates, the inputs of the convolution, and time steps."""
        return self.in_proj(normed, context)

    def _advance(
        self,
        arrays: tuple[jax.Array, jax.Array],
        states: tuple[jax.Array, jax.Array],
        state: LayerState,
        context: LayerContext,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:  # f32[num_tokens, inner], and the states
        """The convolution and the scan of its outputs, as `Advance`."""
        xbc, dt = arrays
        xbc, window = self.conv1d(xbc, states[0], state, context)
        x, b, c = self._heads(xbc)
        dt = jax.nn.softplus(dt.astype(jnp.float32) + self.dt_bias[...].astype(jnp.float32))
        dt = jnp.clip(dt, *self.config.time_step_limit)
        out, scanned = pallas_kernels.ssd_scan(
            *(x * dt[..., None], b, c),
            -jnp.exp(self.A_log[...]) * dt,
            states[1],
            state.query_start_loc,
            positions=context.scan_positions,
            state_ends=state.state_ends,
            has_one_token_each=state.has_one_token_each,
            target=context.kernels.target,
        )
        out += self.D[...].astype(jnp.float32)[:, None] * x
        return out.reshape(out.shape[0], -1), (window, scanned)

    def _heads(
        self,
        xbc: jax.Array,  # f32[num_tokens, num_channels]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x f32[num_tokens, num_heads, head_dim]; b and c f32[num_tokens, groups, state_size]."""
        config = self.config
        width = config.num_groups * config.state_size
        x, b, c = jnp.split(xbc, [config.inner, config.inner + width], axis=1)
        b, c = (y.reshape(y.shape[0], config.num_groups, config.state_size) for y in (b, c))
        return x.reshape(x.shape[0], config.num_heads, config.head_dim), b, c

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
