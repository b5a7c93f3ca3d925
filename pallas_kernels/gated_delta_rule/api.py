"""Public op `gated_delta_rule`: its contract, checks, and choice of implementation."""

import jax

from pallas_kernels.argument_checks import require_float, require_int32, require_shape
from pallas_kernels.dispatch import Body, run_op
from pallas_kernels.gated_delta_rule.reference import gated_delta_rule_reference
from pallas_kernels.gated_delta_rule.xla import gated_delta_rule_xla
from pallas_kernels.gated_delta_step.api import gated_delta_step
from pallas_kernels.paged_states import PagedStates
from pallas_kernels.target import Target

_OP = "gated_delta_rule"
_BODIES: dict[str, Body] = {
    "reference": gated_delta_rule_reference,
    "xla": gated_delta_rule_xla,
}


def gated_delta_rule(
    q: jax.Array,  # f[num_tokens, num_heads, k_dim]
    k: jax.Array,  # f[num_tokens, num_heads, k_dim]
    v: jax.Array,  # f[num_tokens, num_heads, v_dim]
    log_decay: jax.Array,  # f[num_tokens, num_heads] or f[num_tokens, num_heads, k_dim]
    beta: jax.Array,  # f[num_tokens, num_heads]
    states: jax.Array | PagedStates,  # f32[num_reqs, num_heads, k_dim, v_dim]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    *,
    positions: jax.Array | None = None,  # i32[num_tokens]
    state_ends: jax.Array | None = None,  # i32[num_reqs]
    has_one_token_each: bool = False,
    implementation: str | None = None,
    target: Target | None = None,
) -> tuple[jax.Array, jax.Array | PagedStates]:
    """Updates the state of each head with each token, and reads it with the token's query.

    For each token in turn, S = exp(log_decay) S, then S = S + k (beta (v - k^T S))^T, and the
    result is q^T S. So if a key occurs again, its value is replaced, by the share `beta`.

    Args:
        q: Queries, scaled; `k` are keys, of length 1 in trained models.
        log_decay: At most 0. One number per head, or one per row of its state.
        states: The states before this step; zeros for a request that starts. If they are in pages,
            `gated_delta_step` advances them there; `has_one_token_each` must be true.
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
        The results, f32[num_tokens, num_heads, v_dim], and the states, f32 or in pages.
        Results of tokens of no request, and states of requests without tokens, are undefined.

    Raises:
        ValueError: A shape, a dtype, or the implementation's name does not fit.

    Source: Gated DeltaNet, arXiv:2412.06464, equation 10; with a decay per row of the state, Kimi
    Linear, arXiv:2510.26692.
    """
    if isinstance(states, PagedStates):
        states.check_one_token_each(_OP, has_one_token_each)
        states, out = gated_delta_step(
            *(states, q, k, v, log_decay, beta), implementation=implementation, target=target
        )
        return out, states
    require_shape(_OP, "q", q, ("num_tokens", "num_heads", "k_dim"))
    require_shape(_OP, "k", k, q.shape)
    require_shape(_OP, "v", v, (*q.shape[:2], "v_dim"))
    require_shape(_OP, "log_decay", log_decay, q.shape[: max(2, log_decay.ndim)])
    require_shape(_OP, "beta", beta, q.shape[:2])
    require_shape(_OP, "states", states, ("num_reqs", *q.shape[1:], v.shape[2]))
    require_shape(_OP, "query_start_loc", query_start_loc, (states.shape[0] + 1,))
    require_float(_OP, q=q, k=k, v=v, log_decay=log_decay, beta=beta, states=states)
    require_int32(_OP, query_start_loc=query_start_loc)
    if positions is not None:
        require_shape(_OP, "positions", positions, (q.shape[0],))
        require_int32(_OP, positions=positions)
    if state_ends is not None:
        require_shape(_OP, "state_ends", state_ends, (states.shape[0],))
        require_int32(_OP, state_ends=state_ends)
    if has_one_token_each and q.shape[0] != states.shape[0]:
        raise ValueError(
            f"{_OP}: with has_one_token_each there must be a row of tokens for each request: got "
            f"{q.shape[0]} tokens and {states.shape[0]} requests."
        )
    arrays = (q, k, v, log_decay, beta, states, query_start_loc)
    options = {
        "positions": positions,
        "state_ends": state_ends,
        "has_one_token_each": has_one_token_each,
    }
    return run_op(_OP, _BODIES, implementation, target, *arrays, **options)
