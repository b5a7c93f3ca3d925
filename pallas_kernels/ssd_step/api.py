"""Public op `ssd_step`: its contract, checks, and choice of implementation."""

from dataclasses import replace

import jax

from pallas_kernels.argument_checks import require_float, require_shape
from pallas_kernels.dispatch import Body, mosaic_bodies, run_op
from pallas_kernels.paged_states import PagedStates
from pallas_kernels.ssd_step.reference import ssd_step_reference
from pallas_kernels.ssd_step.xla import ssd_step_xla
from pallas_kernels.target import Target

_OP = "ssd_step"
_BODIES: dict[str, Body] = {
    "reference": ssd_step_reference,
    "xla": ssd_step_xla,
    **mosaic_bodies("pallas_kernels.ssd_step", "ssd_step", "gpu"),
}


def ssd_step(
    states: PagedStates,  # of [num_heads, head_dim, state_size]
    x: jax.Array,  # f[num_reqs, num_heads, head_dim]
    b: jax.Array,  # f[num_reqs, num_groups, state_size]
    c: jax.Array,  # f[num_reqs, num_groups, state_size]
    log_decay: jax.Array,  # f[num_reqs, num_heads]
    *,
    implementation: str | None = None,
    target: Target | None = None,
) -> tuple[PagedStates, jax.Array]:
    """`ssd_scan` for one token of each request, with states in the pages of a cache.

    The write is in place if the caller donates the pages and rebinds them (on the CPU, see
    `kv_scatter`).

    Args:
        implementation: `None` picks the fastest body on `target`.
        target: What the program is compiled for; `None` is JAX's default device.

    Returns:
        The states, with the pages after the step, and the results, f32[num_reqs, num_heads,
        head_dim]. Results of requests that write nothing are undefined.

    Raises:
        ValueError: A shape, a dtype, or the implementation's name does not fit. Values are traced,
            so they are not checked here.

    Source: as `ssd_scan`.
    """
    require_shape(_OP, "x", x, ("num_reqs", "num_heads", "head_dim"))
    require_shape(_OP, "b", b, (x.shape[0], "num_groups", "state_size"))
    require_shape(_OP, "c", c, b.shape)
    require_shape(_OP, "log_decay", log_decay, x.shape[:2])
    require_float(_OP, x=x, b=b, c=c, log_decay=log_decay)
    if x.shape[1] % b.shape[1]:
        raise ValueError(
            f"{_OP}: {b.shape[1]} groups must divide the heads of x, got {x.shape[1]}."
        )
    states.check(_OP, x.shape[0], (*x.shape[1:], b.shape[2]))
    pages, out = run_op(_OP, _BODIES, implementation, target, states, x, b, c, log_decay)
    return replace(states, pages=pages), out
