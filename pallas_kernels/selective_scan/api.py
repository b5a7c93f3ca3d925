"""Public op `selective_scan`: its contract, checks, and choice of implementation."""

import jax

from pallas_kernels.argument_checks import require_float, require_int32, require_shape
from pallas_kernels.dispatch import Body, run_op
from pallas_kernels.paged_states import PagedStates
from pallas_kernels.selective_scan.reference import selective_scan_reference
from pallas_kernels.selective_scan.xla import selective_scan_xla
from pallas_kernels.selective_step.api import selective_step
from pallas_kernels.target import Target

_OP = "selective_scan"
_BODIES: dict[str, Body] = {"reference": selective_scan_reference, "xla": selective_scan_xla}


def selective_scan(
    x: jax.Array,  # f[num_tokens, num_groups, width]
    dt: jax.Array,  # f[num_tokens, num_groups, width]
    a: jax.Array,  # f[num_groups, state_size, width]
    b: jax.Array,  # f[num_tokens, num_groups, state_size]
    c: jax.Array,  # f[num_tokens, num_groups, state_size]
    states: jax.Array | PagedStates,  # f32[num_reqs, num_groups, state_size, width]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    *,
    state_ends: jax.Array | None = None,  # i32[num_reqs]
    has_one_token_each: bool = False,
    implementation: str | None = None,
    target: Target | None = None,
) -> tuple[jax.Array, jax.Array | PagedStates]:
    """Updates the state of each group with each token, and reads it with the token's `c`.

    For each token in turn, S = exp(dt a) S + b (dt x)^T, and the result is c^T S. The products with
    `dt` are by channel. Tokens of a request are computed one after the other, so the bits of a
    result do not depend on how a prompt was cut into steps.

    Args:
        x: Inputs.
        dt: Time steps, at least 0.
        a: The decay of each number of the state per unit of time, at most 0.
        b: Shared by the channels of a group; so is `c`.
        states: The states before this step; zeros for a request that starts. If they are in pages,
            `selective_step` advances them there; `has_one_token_each` must be true.
        query_start_loc: Request r has tokens `query_start_loc[r]:query_start_loc[r + 1]`.
        state_ends: The state returned for request r is that before token `state_ends[r]`, in
            `[query_start_loc[r], query_start_loc[r + 1]]`. Results do not depend on it. None: the
            state after the request's last token.
        has_one_token_each: Whether request r has token r or no token. All tokens are then computed
            at once.
        implementation: `None` picks the fastest body on `target`.
        target: What the program is compiled for; `None` is JAX's default device.

    Returns:
        The results, f32[num_tokens, num_groups, width], and the states, f32 or in pages. Results of
        tokens of no request, and states of requests without tokens, are undefined.

    Raises:
        ValueError: A shape, a dtype, or the implementation's name does not fit.

    Source: Mamba, arXiv:2312.00752, algorithm 2.
    """
    if isinstance(states, PagedStates):
        states.check_one_token_each(_OP, has_one_token_each)
        states, out = selective_step(
            states, x, dt, a, b, c, implementation=implementation, target=target
        )
        return out, states
    require_shape(_OP, "x", x, ("num_tokens", "num_groups", "width"))
    require_shape(_OP, "dt", dt, x.shape)
    require_shape(_OP, "a", a, (x.shape[1], "state_size", x.shape[2]))
    require_shape(_OP, "b", b, (*x.shape[:2], a.shape[1]))
    require_shape(_OP, "c", c, b.shape)
    require_shape(_OP, "states", states, ("num_reqs", *a.shape))
    require_shape(_OP, "query_start_loc", query_start_loc, (states.shape[0] + 1,))
    require_float(_OP, x=x, dt=dt, a=a, b=b, c=c, states=states)
    require_int32(_OP, query_start_loc=query_start_loc)
    if state_ends is not None:
        require_shape(_OP, "state_ends", state_ends, (states.shape[0],))
        require_int32(_OP, state_ends=state_ends)
    if has_one_token_each and x.shape[0] != states.shape[0]:
        raise ValueError(
            f"{_OP}: with has_one_token_each there must be a row of tokens for each request: got "
            f"{x.shape[0]} tokens and {states.shape[0]} requests."
        )
    arrays = (x, dt, a, b, c, states, query_start_loc)
    options = {"state_ends": state_ends, "has_one_token_each": has_one_token_each}
    return run_op(_OP, _BODIES, implementation, target, *arrays, **options)
