"""Public op `selective_step`: its contract, checks, and choice of implementation."""

from dataclasses import replace

import jax

from pallas_kernels.argument_checks import require_float, require_shape
from pallas_kernels.dispatch import Body, mosaic_bodies, run_op
from pallas_kernels.paged_states import PagedStates
from pallas_kernels.selective_step.reference import selective_step_reference
from pallas_kernels.selective_step.xla import selective_step_xla
from pallas_kernels.target import Target

_OP = "selective_step"
_BODIES: dict[str, Body] = {
    "reference": selective_step_reference,
    "xla": selective_step_xla,
    **mosaic_bodies("pallas_kernels.selective_step", "selective_step", "gpu"),
}


def selective_step(
    states: PagedStates,  # of [num_groups, state_size, width]
    x: jax.Array,  # f[num_reqs, num_groups, width]
    dt: jax.Array,  # f[num_reqs, num_groups, width]
    a: jax.Array,  # f[num_groups, state_size, width]
    b: jax.Array,  # f[num_reqs, num_groups, state_size]
    c: jax.Array,  # f[num_reqs, num_groups, state_size]
    *,
    implementation: str | None = None,
    target: Target | None = None,
) -> tuple[PagedStates, jax.Array]:
    """`selective_scan` for one token of each request, with states in the pages of a cache.

    The write is in place if the caller donates the pages and rebinds them (on the CPU, see
    `kv_scatter`).

    Args:
        implementation: `None` picks the fastest body on `target`.
        target: What the program is compiled for; `None` is JAX's default device.

    Returns:
        The states, with the pages after the step, and the results, f32[num_reqs, num_groups,
        width]. Results of requests that write nothing are undefined.

    Raises:
        ValueError: A shape, a dtype, or the implementation's name does not fit. Values are traced,
            so they are not checked here.

    Source: as `selective_scan`.
    """
    require_shape(_OP, "x", x, ("num_reqs", "num_groups", "width"))
    require_shape(_OP, "dt", dt, x.shape)
    require_shape(_OP, "a", a, (x.shape[1], "state_size", x.shape[2]))
    require_shape(_OP, "b", b, (*x.shape[:2], a.shape[1]))
    require_shape(_OP, "c", c, b.shape)
    require_float(_OP, x=x, dt=dt, a=a, b=b, c=c)
    states.check(_OP, x.shape[0], a.shape)
    pages, out = run_op(_OP, _BODIES, implementation, target, states, x, dt, a, b, c)
    return replace(states, pages=pages), out
