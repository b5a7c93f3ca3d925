"""`Mamba`: a state space with a decay for each number of its state (Mamba's first form)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import pallas_kernels
from models.cache.format import Pages
from models.cache.state_format import StateFormat
from models.config.fields import read_count
from models.forward.layer_context import LayerContext, LayerState
from models.layers.advance_states import advance_states
from models.layers.linear import Linear
from models.layers.mamba2 import MAMBA
from models.layers.self_attention import Norm
from models.layers.short_convolution import ShortConvolution
from models.weight_rule import Source, WeightRule


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig:
    """The sizes of a `Mamba`.

    Args:
        inner: Channels of the convolution and of the state space.
        time_step_rank: Width of a token's time steps before they are projected to all channels.
        num_groups: Groups of consecutive channels. The channels of a group share B, the vector that
            a token writes into the state, and C, the vector that it reads the state with.
    """

    hidden_size: int
    inner: int
    state_size: int
    time_step_rank: int
    kernel_size: int  # of the convolution
    num_groups: int = 1
    use_bias: bool = False
    use_conv_bias: bool = True

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.num_groups, self.state_size, self.inner // self.num_groups

    def format(self) -> StateFormat:
        """The inputs that the next convolution needs, and the state."""
        return StateFormat(
            shapes=((self.kernel_size - 1, self.inner), self.state_shape),
            num_windows=1,
            step_op="selective_step",
        )


def read_time_step_rank(hf_config: Mapping[str, object], name: str) -> int:
    """Reads `time_step_rank`; "auto", the default, is the hidden size / 16, rounded up."""
    rank = -(-read_count(hf_config, "hidden_size") // 16)
    return rank if hf_config.get(name) == "auto" else read_count(hf_config, name, rank)


class Mamba(nnx.Module):
    """A `SelfAttention` whose cache is a state.

    Source: arXiv:2312.00752.
    """

    def __init__(
        self,
        config: MambaConfig,
        *,
        norm: Callable[[int], nnx.Module] | None = None,
        dtype: jnp.dtype,
    ) -> None:
        """Makes the layer with weights to be filled in.

        Args:
            norm: Makes a norm over the given number of features. The layer has one for time steps
                before their projection, one for B and one for C. None: no norms.
        """
        self.config = config
        inner, use_bias = config.inner, config.use_bias
        self.in_proj = Linear(
            config.hidden_size, 2 * inner, axes=(None, "heads"), use_bias=use_bias, dtype=dtype
        )
        self.conv1d = ShortConvolution(
            inner, config.kernel_size, use_bias=config.use_conv_bias, dtype=dtype
        )
        self._make_projections(dtype)
        self.dt_layernorm = norm(config.time_step_rank) if norm else None
        self.b_layernorm = norm(config.state_size) if norm else None
        self.c_layernorm = norm(config.state_size) if norm else None
        # Vectors, because the CPU's loop over layers copies only vectors.
        self.A_log = nnx.Param(jnp.zeros((config.state_size * inner,), jnp.float32))
        self.D = nnx.Param(jnp.zeros((inner,), dtype))
        self.out_proj = Linear(
            inner, config.hidden_size, axes=("heads", None), use_bias=use_bias, dtype=dtype
        )

    def _make_projections(self, dtype: jnp.dtype) -> None:
        """Makes the projections to time steps, to B and to C."""
        config = self.config
        width = config.time_step_rank + 2 * config.state_size
        self.x_proj = Linear(config.inner, width, dtype=dtype)
        self.dt_proj = Linear(config.time_step_rank, config.inner, use_bias=True, dtype=dtype)

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`. Checkpoints store the decays as [inner, state_size]."""
        inner = self.config.inner
        decays = Source(name=f"{name}.A_log", shape=(inner, self.config.state_size))
        skips = Source(name=f"{name}.D", shape=(inner,))
        return {
            "A_log": WeightRule(
                sources=(decays,), layout="vector", axes=(None,), combine=_by_state
            ),
            "D": WeightRule(sources=(skips,), layout="vector", axes=(None,)),
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

        def project(hidden: jax.Array, context: LayerContext) -> jax.Array:
            # The state is whole on each device of a mesh.
            return context.kernels.split_last(self.in_proj(norm(hidden), context), None)

        x, gate = jnp.split(context.by_token(project, hidden), 2, axis=1)
        out, pages = advance_states(self._advance, MAMBA, (x,), pages, context)
        kept = map(context.kept, (out, gate))
        return context.of_kept().by_token(_gate, *kept), pages

    def project_out(
        self,
        attended: jax.Array,  # f[num_queries, inner]
        context: LayerContext,
    ) -> jax.Array:  # f[num_queries, hidden]
        attended = context.kernels.split_last(attended, None)
        return self.out_proj(attended, context)

    def _advance(
        self,
        arrays: tuple[jax.Array],
        states: tuple[jax.Array, jax.Array],
        state: LayerState,
        context: LayerContext,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:  # f32[num_tokens, inner], and the states
        """The convolution and the scan of its outputs, as `Advance`."""
        (projected,) = arrays
        x, window = self.conv1d(projected, states[0], state, context)
        dt, b, c = context.by_token(self._project_state, x.astype(projected.dtype))
        groups = (x.shape[0], self.config.num_groups, -1)
        out, scanned = pallas_kernels.selective_scan(
            x.reshape(groups),
            dt.reshape(groups),
            -jnp.exp(self.A_log[...]).reshape(self.config.state_shape),
            b.reshape(groups),
            c.reshape(groups),
            states[1],
            state.query_start_loc,
            state_ends=state.state_ends,
            has_one_token_each=state.has_one_token_each,
            target=context.kernels.target,
        )
        out = out.reshape(x.shape) + self.D[...].astype(jnp.float32) * x
        return out, (window, scanned)

    def _project_state(
        self,
        x: jax.Array,  # f[num_rows, inner]
        context: LayerContext,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Time steps, f32[num_rows, inner]; B and C, f[num_rows, num_groups * state_size]."""
        ends = [self.config.time_step_rank, self.config.time_step_rank + self.config.state_size]
        dt, b, c = jnp.split(self.x_proj(x, context), ends, axis=1)
        if self.dt_layernorm is not None:
            dt, b, c = self.dt_layernorm(dt), self.b_layernorm(b), self.c_layernorm(c)
        dt = self.dt_proj(dt, context).astype(jnp.float32)
        return jax.nn.softplus(dt), b, c


def _gate(
    out: jax.Array,  # f32[num_rows, inner]
    gate: jax.Array,  # f[num_rows, inner]
    context: LayerContext,
) -> jax.Array:  # f[num_rows, inner]
    return (out * jax.nn.silu(gate.astype(jnp.float32))).astype(gate.dtype)


def _by_state(weights_np: Sequence[np.ndarray]) -> np.ndarray:
    (weight_np,) = weights_np
    return np.ascontiguousarray(weight_np.T).reshape(-1)
