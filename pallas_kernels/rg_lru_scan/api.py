"""Public op `rg_lru_scan`: its contract, checks, and choice of implementation."""

import jax

from pallas_kernels.argument_checks import require_float, require_int32, require_shape
from pallas_kernels.dispatch import Body, run_op
from pallas_kernels.rg_lru_scan.reference import rg_lru_scan_reference
from pallas_kernels.rg_lru_scan.xla import rg_lru_scan_xla
from pallas_kernels.target import Target

_OP = "rg_lru_scan"
_BODIES: dict[str, Body] = {"reference": rg_lru_scan_reference, "xla": rg_lru_scan_xla}


def rg_lru_scan(
    x: jax.Array,  # f[num_tokens, width]
    log_decay: jax.Array,  # f[num_tokens, width]
    states: jax.Array,  # f32[num_reqs, width]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    *,
    state_ends: jax.Array | None = None,  # i32[num_reqs]
    has_one_token_each: bool = False,
    implementation: str | None = None,
    target: Target | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Updates the state with each token: h = exp(log_decay) h + x, and the result is h.

    Tokens of a request are computed one after the other, so the bits of a result do not depend on
    how a prompt was cut into steps.

    Args:
        x: Inputs, gated and scaled.
        log_decay: At most 0.
        states: The states before this step; zeros for a request that starts.
        query_start_loc: Request r has tokens `query_start_loc[r]:query_start_loc[r + 1]`.
        state_ends: The state returned for request r is that before token `state_ends[r]`, in
            `[query_start_loc[r], query_start_loc[r + 1]]`. Results do not depend on it. None: the
            state after the request's last token.
        has_one_token_each: Whether request r has token r or no token. All tokens are then computed
            at once.
        implementation: `None` picks the fastest body on `target`.
        target: What the program is compiled for; `None` is JAX's default device.

    Returns:
        The results, f32[num_tokens, width], and the states, f32. Results of tokens of no request,
        and states of requests without tokens, are undefined.

    Raises:
        ValueError: A shape, a dtype, or the implementation's name does not fit.

    Source: Griffin, arXiv:2402.19427, section 2.4.
    """
    require_shape(_OP, "x", x, ("num_tokens", "width"))
    require_shape(_OP, "log_decay", log_decay, x.shape)
    require_shape(_OP, "states", states, ("num_reqs", x.shape[1]))
    require_shape(_OP, "query_start_loc", query_start_loc, (states.shape[0] + 1,))
    require_float(_OP, x=x, log_decay=log_decay, states=states)
    require_int32(_OP, query_start_loc=query_start_loc)
    if state_ends is not None:
        require_shape(_OP, "state_ends", state_ends, (states.shape[0],))
        require_int32(_OP, state_ends=state_ends)
    if has_one_token_each and x.shape[0] != states.shape[0]:
        raise ValueError(
            f"{_OP}: with has_one_token_each there must be a row of tokens for each request: got "
            f"{x.shape[0]} tokens and {states.shape[0]} requests."
        )
    arrays = (x, log_decay, states, query_start_loc)
    options = {"state_ends": state_ends, "has_one_token_each": has_one_token_each}
    return run_op(_OP, _BODIES, implementation, target, *arrays, **options)
