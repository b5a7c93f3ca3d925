"""Chooses the body of an op: the names of the implementations, and the rule that picks one.

A body is one implementation of an op. With `implementation=None`, the Mosaic body of the target's
platform runs if all of this is true:

- the op has such a body,
- the body is written for the target's chip,
- JAX is new enough,
- the body's `misfit` returns None for the arguments.

Otherwise the op runs as plain XLA, and the reason is logged once.

A program calls a Mosaic body as a function (`_outlined`). All layers whose calls have the same
shapes and static arguments share this function, so JAX lowers its kernels once per program and
Mosaic compiles them once.
"""

import contextlib
import contextvars
import functools
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.target import Target, default_target

Implementation = Literal[
    "reference",
    "xla",
    "mosaic_gpu",
    "mosaic_gpu_interpret",
    "mosaic_tpu",
    "mosaic_tpu_interpret",
]
IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)

# Before 0.11.2 `plgpu.kernel` cannot take a Ref under jit, and interpret mode is not public.
MIN_JAX_FOR_MOSAIC_GPU = (0, 11, 2)
_MOSAIC_OF_PLATFORM = {"gpu": "mosaic_gpu", "tpu": "mosaic_tpu"}
# v5e and v6e, each under both of JAX's names. The TPU bodies choose their tiles for the memory of
# these chips. A v4 has an eighth of their VMEM, 16 MiB, and the compiler rejects large tiles.
_TPU_KINDS = ("TPU v5 lite", "TPU v5e", "TPU v6 lite", "TPU v6e")

_logger = logging.getLogger(__name__)
_misfits: contextvars.ContextVar[dict[str, None]] = contextvars.ContextVar("misfits")


@dataclass(frozen=True, slots=True)
class LateBody:
    """A body whose module is imported on first use, because Mosaic takes 0.3 s to import.

    The module also has a function `misfit` with the same arguments. It returns why the body cannot
    take them, or None. It looks at shapes, dtypes and static arguments only.
    """

    module: str
    function: str
    is_interpreted: bool = False  # the body is called with interpret=True

    def load(self) -> Callable[..., Any]:
        body = getattr(importlib.import_module(self.module), self.function)
        return functools.partial(body, interpret=True) if self.is_interpreted else body

    def misfit(self, *args: object, **kwargs: object) -> str | None:
        return importlib.import_module(self.module).misfit(*args, **kwargs)


Body = Callable[..., Any] | LateBody


def mosaic_bodies(package: str, function: str, *platforms: str) -> dict[str, LateBody]:
    """Name -> Mosaic body of an op, for its table of bodies.

    Each platform has two entries: the compiled body, and an interpreted one for tests without the
    device. The body for GPUs is `<package>.mosaic_gpu.<function>_mosaic_gpu`.
    """
    return {
        f"mosaic_{platform}{suffix}": LateBody(
            module=f"{package}.mosaic_{platform}",
            function=f"{function}_mosaic_{platform}",
            is_interpreted=bool(suffix),
        )
        for platform in platforms
        for suffix in ("", "_interpret")
    }


def run_op(
    op_name: str,
    bodies: Mapping[str, Body],
    implementation: str | None,
    target: Target | None,
    *args: object,
    **kwargs: object,
) -> Any:
    """Picks one of an op's bodies and calls it.

    Args:
        implementation: A body's name; `None` means the fastest one for `target`.
        target: What the program is compiled for; `None` means JAX's default device.
        *args: Arrays, and integers that may differ between layers, such as the row of the cache. A
            Mosaic body gets all of them as operands.
        **kwargs: Arrays, and hashable values. A Mosaic body is compiled for each hashable value.

    Raises:
        ValueError: The op has no body of this name, or the named body cannot do this call.
    """
    # NumPy's arrays lack some methods that bodies use.
    args = tuple(jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in args)
    name = implementation
    if name is None:
        name = preferred_body(op_name, bodies, target or default_target(), *args, **kwargs)
    if name not in bodies:
        raise ValueError(
            f"{op_name} has no such implementation: got {name!r}, "
            f"wanted None or one of {sorted(bodies)}."
        )
    body = bodies[name]
    if not isinstance(body, LateBody):
        return body(*args, **kwargs)
    reason = _old_jax_misfit(name) or body.misfit(*args, **kwargs)
    if reason is not None:
        raise ValueError(
            f"{op_name}: the body {name!r} cannot do this call: {reason}. "
            "Pass implementation=None to use a body that can."
        )
    if body.is_interpreted:
        return body.load()(*args, **kwargs)
    static = tuple(name for name, x in kwargs.items() if not isinstance(x, jax.Array | np.ndarray))
    return _outlined(body, static)(*args, **kwargs)


@functools.cache
def _outlined(body: LateBody, static: tuple[str, ...]) -> Callable[..., Any]:
    """The body as a jitted function; `static` names its static arguments.

    JAX caches the traces of this function, and a program that calls one trace several times
    contains it once. Without the function, JAX lowers the kernels of each layer again. JAX 0.11.2
    then also compiles them again, because it writes a running number into every lowered kernel.
    """
    return jax.jit(body.load(), static_argnames=static)


def preferred_body(
    op_name: str,
    bodies: Mapping[str, Body],
    target: Target,
    *args: object,
    **kwargs: object,
) -> str:
    """The name of the fastest body for a call on a target; logs once why it is not Mosaic."""
    name = _MOSAIC_OF_PLATFORM.get(target.platform)
    if name not in bodies:
        return "xla"
    reason = target_misfit(target) or bodies[name].misfit(*args, **kwargs)
    if reason is None:
        return name
    message = f"{op_name} runs as plain XLA, not as {name}: {reason}."
    _log_once(message)
    _misfits.get({}).setdefault(message)
    return "xla"


@contextlib.contextmanager
def collect_misfits() -> Iterator[dict[str, None]]:
    """Collects why ops that this thread traces in the block run as plain XLA.

    Yields:
        Sentences in the order of their first occurrence, as the keys of a dictionary.
    """
    found: dict[str, None] = {}
    token = _misfits.set(found)
    try:
        yield found
    finally:
        _misfits.reset(token)


def target_misfit(target: Target) -> str | None:
    """Why no Mosaic body can run on this target with this JAX; None if Mosaic bodies can run.

    A platform without Mosaic bodies also gets a reason, and raises no error.
    """
    name = _MOSAIC_OF_PLATFORM.get(target.platform)
    if name is None:
        return f"no Mosaic body is written for the platform {target.platform!r}"
    if name == "mosaic_gpu" and target.compute_capability != "9.0":
        return (
            f"it needs compute capability 9.0 (H100, H200), and {target.device_kind!r} has "
            f"{target.compute_capability}"
        )
    if name == "mosaic_tpu" and target.device_kind not in _TPU_KINDS:
        return f"its tiles fit the memory of {_TPU_KINDS}, and the device is {target.device_kind!r}"
    return _old_jax_misfit(name)


def _old_jax_misfit(name: str) -> str | None:
    if name.startswith("mosaic_gpu") and jax.__version_info__ < MIN_JAX_FOR_MOSAIC_GPU:
        wanted = ".".join(map(str, MIN_JAX_FOR_MOSAIC_GPU))
        return f"it needs JAX {wanted} or newer (Python 3.12 or newer), this is {jax.__version__}"
    return None


@functools.cache
def _log_once(message: str) -> None:
    _logger.warning(message)
