"""Public op `causal_conv1d`: its contract, checks, and choice of implementation."""

import jax

from pallas_kernels.argument_checks import require_float, require_int32, require_shape
from pallas_kernels.causal_conv1d.reference import causal_conv1d_reference
from pallas_kernels.causal_conv1d.xla import causal_conv1d_xla
from pallas_kernels.dispatch import Body, run_op
from pallas_kernels.target import Target

_OP = "causal_conv1d"
_BODIES: dict[str, Body] = {"reference": causal_conv1d_reference, "xla": causal_conv1d_xla}


def causal_conv1d(
    x: jax.Array,  # f[num_tokens, num_channels]
    window: jax.Array,  # f[num_reqs, kernel_size - 1, num_channels]
    weight: jax.Array,  # f[kernel_size, num_channels]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    *,
    state_ends: jax.Array | None = None,  # i32[num_reqs]
    implementation: str | None = None,
    target: Target | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Adds up each channel's last `kernel_size` inputs, with the weights of the channel.

    The result of a token is `sum(weight[i] * inputs[i])`, where `inputs` are the last inputs of its
    request up to the token's own, oldest first. With weights [1, 10, 100], a window [1, 2] and new
    inputs 3 and 4, the results are 1 + 20 + 300 = 321 and 2 + 30 + 400 = 432, and the new window is
    [3, 4].

    Args:
        window: The inputs of each request before this step, oldest first; zeros before its start.
        query_start_loc: Request r has tokens `query_start_loc[r]:query_start_loc[r + 1]`.
        state_ends: The window returned for request r is that before token `state_ends[r]`, in
            `[query_start_loc[r], query_start_loc[r + 1]]`. Sums do not depend on it. None: the
            window after the request's last token.
        implementation: `None` picks the fastest body on `target`.
        target: What the program is compiled for; `None` is JAX's default device.

    Returns:
        The sums, f32[num_tokens, num_channels], and the windows, f32. Sums of tokens of no request
        may be any finite numbers. Windows of requests without tokens do not change.

    Raises:
        ValueError: A shape, a dtype, or the implementation's name does not fit.

    Source: `causal_conv1d` of Mamba, github.com/Dao-AILab/causal-conv1d.
    """
    require_shape(_OP, "x", x, ("num_tokens", "num_channels"))
    require_shape(_OP, "weight", weight, ("kernel_size", x.shape[1]))
    num_kept = weight.shape[0] - 1
    require_shape(_OP, "window", window, ("num_reqs", num_kept, x.shape[1]))
    require_shape(_OP, "query_start_loc", query_start_loc, (window.shape[0] + 1,))
    require_float(_OP, x=x, window=window, weight=weight)
    require_int32(_OP, query_start_loc=query_start_loc)
    if state_ends is not None:
        require_shape(_OP, "state_ends", state_ends, (window.shape[0],))
        require_int32(_OP, state_ends=state_ends)
    if num_kept < 1:
        raise ValueError(f"{_OP}: weight must have 2 rows or more, got {weight.shape[0]}.")
    arrays = (x, window, weight, query_start_loc)
    return run_op(_OP, _BODIES, implementation, target, *arrays, state_ends=state_ends)
