"""Plain-JAX body of `selective_scan`: one step per request, or a loop over tokens.

The decay of each number of the state depends on the token and on the channel, so tokens cannot be
combined by matrix products. A parallel scan within chunks of tokens computes more and needs memory
for the states of all tokens of a chunk (docs/design/kernels.md, "Prompts in recurrent ops").
"""

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_requests import scan_tokens, step_rows

# Numbers in a line. The pages of a TPU store a state in such lines. One-token steps split the
# channels into lines too. Otherwise, XLA would copy decays, inputs and states to other layouts.
_LANES = 128


def selective_scan_xla(
    x: jax.Array,  # f[num_tokens, num_groups, width]
    dt: jax.Array,  # f[num_tokens, num_groups, width]
    a: jax.Array,  # f[num_groups, state_size, width]
    b: jax.Array,  # f[num_tokens, num_groups, state_size]
    c: jax.Array,  # f[num_tokens, num_groups, state_size]
    states: jax.Array,  # f32[num_reqs, num_groups, state_size, width]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    *,
    state_ends: jax.Array | None = None,  # i32[num_reqs]
    has_one_token_each: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See `api.selective_scan`."""
    shape = x.shape
    # A loop over tokens has no lines: on a CPU, it would take longer with them.
    has_lines = has_one_token_each and shape[-1] % _LANES == 0
    channels = (shape[-1] // _LANES, _LANES) if has_lines else shape[-1:]
    x, dt, a, states = (
        array.astype(jnp.float32).reshape(*array.shape[:-1], *channels)
        for array in (x, dt, a, states)
    )
    over_channels, state_axis = (..., *(None for _ in channels)), -1 - len(channels)

    def step(
        state: jax.Array,  # f32[..., num_groups, state_size, *channels]
        x: jax.Array,  # f32[..., num_groups, *channels]
        dt: jax.Array,  # f32[..., num_groups, *channels]
        b: jax.Array,  # f32[..., num_groups, state_size]
        c: jax.Array,  # f32[..., num_groups, state_size]
    ) -> tuple[jax.Array, jax.Array]:
        added = b[over_channels] * jnp.expand_dims(dt * x, state_axis)
        state = jnp.exp(jnp.expand_dims(dt, state_axis) * a) * state + added
        return state, (c[over_channels] * state).sum(state_axis)

    tokens = (x, dt, b.astype(jnp.float32), c.astype(jnp.float32))
    if has_one_token_each:
        out, states = step_rows(step, states, tokens)
    else:
        out, states = scan_tokens(
            step, states, tokens, query_start_loc, jnp.zeros_like(x), state_ends
        )
    return out.reshape(shape), states.reshape(*states.shape[:3], shape[-1])
