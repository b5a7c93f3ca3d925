"""Public op `ssd_scan`: its contract, checks, and choice of implementation."""

import jax

from pallas_kernels.argument_checks import require_float, require_int32, require_shape
from pallas_kernels.dispatch import Body, run_op
from pallas_kernels.paged_states import PagedStates
from pallas_kernels.ssd_scan.reference import ssd_scan_reference
from pallas_kernels.ssd_scan.xla import ssd_scan_xla
from pallas_kernels.ssd_step.api import ssd_step
from pallas_kernels.target import Target

_OP = "ssd_scan"
_BODIES: dict[str, Body] = {"reference": ssd_scan_reference, "xla": ssd_scan_xla}


def ssd_scan(
    x: jax.Array,  # f[num_tokens, num_heads, head_dim]
    b: jax.Array,  # f[num_tokens, num_groups, state_size]
    c: jax.Array,  # f[num_tokens, num_groups, state_size]
    log_decay: jax.Array,  # f[num_tokens, num_heads]
    states: jax.Array | PagedStates,  # f32[num_reqs, num_heads, head_dim, state_size]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    *,
    positions: jax.Array | None = None,  # i32[num_tokens]
    state_ends: jax.Array | None = None,  # i32[num_reqs]
    has_one_token_each: bool = False,
    implementation: str | None = None,
    target: Target | None = None,
) -> tuple[jax.Array, jax.Array | PagedStates]:
    """Updates the state of each head with each token, and reads it with the token's `c`.

    For each token in turn, S = exp(log_decay) S + x b^T, and the result is S c. Without decay, this
    is linear attention with queries `c`, keys `b` and values `x`.

    Args:
        x: Inputs, scaled by the token's time step.
        b: Shared by the `num_heads / num_groups` consecutive heads of a group; so is `c`.
        log_decay: At most 0.
        states: The states before this step; zeros for a request that starts. If they are in pages,
            `ssd_step` advances them there; `has_one_token_each` must be true.
        query_start_loc: Request r has tokens `query_start_loc[r]:query_start_loc[r + 1]`.
        positions: Of each token in its request. Consecutive tokens of a request may be computed
            together, in chunks that begin at fixed positions. None: each token is computed by
            itself, so its result has the same bits in every batch.
        state_ends: The state returned for request r is that before token `state_ends[r]`, in
            `[query_start_loc[r], query_start_loc[r + 1]]`. Results do not depend on it. None: the
            state after the request's last token.
        has_one_token_each: Whether request r has token r or no token. All tokens are then computed
            at once.
        implementation: `None` picks the fastest body on `target`.
        target: What the program is compiled for; `None` is JAX's default device.

    Returns:
        The results, f32[num_tokens, num_heads, head_dim], and the states, f32 or in pages.
        Results of tokens of no request, and states of requests without tokens, are undefined.

    Raises:
        ValueError: A shape, a dtype, or the implementation's name does not fit.

    Source: Mamba-2, arXiv:2405.21060, section 6.
    """
    if isinstance(states, PagedStates):
        states.check_one_token_each(_OP, has_one_token_each)
        states, out = ssd_step(
            states, x, b, c, log_decay, implementation=implementation, target=target
        )
        return out, states
    require_shape(_OP, "x", x, ("num_tokens", "num_heads", "head_dim"))
    require_shape(_OP, "b", b, (x.shape[0], "num_groups", "state_size"))
    require_shape(_OP, "c", c, b.shape)
    require_shape(_OP, "log_decay", log_decay, x.shape[:2])
    require_shape(_OP, "states", states, ("num_reqs", *x.shape[1:], b.shape[2]))
    require_shape(_OP, "query_start_loc", query_start_loc, (states.shape[0] + 1,))
    require_float(_OP, x=x, b=b, c=c, log_decay=log_decay, states=states)
    require_int32(_OP, query_start_loc=query_start_loc)
    if x.shape[1] % b.shape[1]:
        raise ValueError(
            f"{_OP}: {b.shape[1]} groups must divide the heads of x, got {x.shape[1]}."
        )
    if positions is not None:
        require_shape(_OP, "positions", positions, (x.shape[0],))
        require_int32(_OP, positions=positions)
    if state_ends is not None:
        require_shape(_OP, "state_ends", state_ends, (states.shape[0],))
        require_int32(_OP, state_ends=state_ends)
    if has_one_token_each and x.shape[0] != states.shape[0]:
        raise ValueError(
            f"{_OP}: with has_one_token_each there must be a row of tokens for each request: got "
            f"{x.shape[0]} tokens and {states.shape[0]} requests."
        )
    arrays = (x, b, c, log_decay, states, query_start_loc)
    options = {
        "positions": positions,
        "state_ends": state_ends,
        "has_one_token_each": has_one_token_each,
    }
    return run_op(_OP, _BODIES, implementation, target, *arrays, **options)
