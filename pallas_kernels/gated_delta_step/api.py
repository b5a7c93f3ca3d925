"""Public op `gated_delta_step`: its contract, checks, and choice of implementation."""

from dataclasses import replace

import jax

from pallas_kernels.argument_checks import require_float, require_shape
from pallas_kernels.dispatch import Body, mosaic_bodies, run_op
from pallas_kernels.gated_delta_step.reference import gated_delta_step_reference
from pallas_kernels.gated_delta_step.xla import gated_delta_step_xla
from pallas_kernels.paged_states import PagedStates
from pallas_kernels.target import Target

_OP = "gated_delta_step"
_BODIES: dict[str, Body] = {
    "reference": gated_delta_step_reference,
    "xla": gated_delta_step_xla,
    **mosaic_bodies("pallas_kernels.gated_delta_step", "gated_delta_step", "gpu"),
}


def gated_delta_step(
    states: PagedStates,  # of [num_heads, k_dim, v_dim]
    q: jax.Array,  # f[num_reqs, num_heads, k_dim]
    k: jax.Array,  # f[num_reqs, num_heads, k_dim]
    v: jax.Array,  # f[num_reqs, num_heads, v_dim]
    log_decay: jax.Array,  # f[num_reqs, num_heads] or f[num_reqs, num_heads, k_dim]
    beta: jax.Array,  # f[num_reqs, num_heads]
    *,
    implementation: str | None = None,
    target: Target | None = None,
) -> tuple[PagedStates, jax.Array]:
    """`gated_delta_rule` for one token of each request, with states in the pages of a cache.

    The write is in place if the caller donates the pages and rebinds them (on the CPU, see
    `kv_scatter`).

    Args:
        implementation: `None` picks the fastest body on `target`.
        target: What the program is compiled for; `None` is JAX's default device.

    Returns:
        The states, with the pages after the step, and the results, f32[num_reqs, num_heads, v_dim].
        Results of requests that write nothing are undefined.

    Raises:
        ValueError: A shape, a dtype, or the implementation's name does not fit. Values are traced,
            so they are not checked here.

    Source: as `gated_delta_rule`.
    """
    require_shape(_OP, "q", q, ("num_reqs", "num_heads", "k_dim"))
    require_shape(_OP, "k", k, q.shape)
    require_shape(_OP, "v", v, (*q.shape[:2], "v_dim"))
    require_shape(_OP, "log_decay", log_decay, q.shape[: max(2, log_decay.ndim)])
    require_shape(_OP, "beta", beta, q.shape[:2])
    require_float(_OP, q=q, k=k, v=v, log_decay=log_decay, beta=beta)
    states.check(_OP, q.shape[0], (*q.shape[1:], v.shape[2]))
    arrays = (states, q, k, v, log_decay, beta)
    pages, out = run_op(_OP, _BODIES, implementation, target, *arrays)
    return replace(states, pages=pages), out
