"""Checks at the start that the kernels for this device compute what plain XLA computes.

Most tests of a kernel run without the device that it is written for. So an engine runs small random
inputs in the shapes of its model when it starts. If the kernels are wrong, it logs an error and
uses plain XLA.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax

import pallas_kernels
from models.cache.self_test import MAX_RELATIVE_ERROR, SelfTest, relative_error
from pallas_kernels.dispatch import collect_misfits, target_misfit
from paxkv.runner.programs.expert_check import CheckedProduct, multiply_and_compare

logger = logging.getLogger(__name__)


class KernelChoice(NamedTuple):
    """What computes the operations on the KV cache.

    Args:
        implementation: The `implementation` that the model passes to every op: "xla", or None if
            each op chooses for itself.
        why_no_kernels: Why all ops run as plain XLA, a sentence; None if they do not.
        ops_without_kernels: Why some ops run as plain XLA nevertheless, a sentence each.
    """

    implementation: str | None
    why_no_kernels: str | None = None
    ops_without_kernels: tuple[str, ...] = ()


def choose_implementation(
    kernels: str,
    tests: Sequence[SelfTest],
    products: Iterable[CheckedProduct],
    device: jax.Device,
) -> KernelChoice:
    """Chooses between plain XLA and the kernels for a device.

    Args:
        kernels: `RunnerConfig.kernels`.
        tests: Of the model's caches.
        products: Of its layers with experts.
    """
    target = pallas_kernels.target_of(device)
    if kernels == "xla":
        return KernelChoice("xla", "--kernels xla is set.")
    misfit = target_misfit(target)
    if misfit is not None:
        return KernelChoice(None, f"{misfit}.")  # dispatch chooses XLA by itself
    with collect_misfits() as misfits:
        reason = why_kernels_differ(tests, target) or why_products_differ(products, target)
    if reason is None:
        return KernelChoice(None, None, tuple(misfits))
    logger.error(
        "the kernels for %s are not used, plain XLA is: %s. Please report this, with the model, "
        "the versions of jax and of the driver, and this line.",
        target.device_kind,
        reason,
    )
    return KernelChoice("xla", f"the kernels failed the check at the start: {reason}.")


def why_kernels_differ(
    tests: Iterable[SelfTest],
    target: pallas_kernels.Target,
    *,
    implementation: str | None = None,
) -> str | None:
    """Runs each of the tests once, with `implementation`.

    Returns:
        What differs from plain XLA; None if nothing does.
    """
    for test in dict.fromkeys(tests):
        try:
            reason = test.why_kernels_differ(target, implementation=implementation)
        # Whatever goes wrong in a compiler or on the device, plain XLA can still serve.
        except Exception as error:
            logger.exception("a kernel failed")
            return f"running them raised {type(error).__name__}"
        if reason is not None:
            return reason
    return None


def why_products_differ(
    products: Iterable[CheckedProduct],
    target: pallas_kernels.Target,
    *,
    implementation: str | None = None,
) -> str | None:
    """Runs products of experts with `implementation` and with XLA.

    Returns:
        What differs; None if nothing does.
    """
    try:
        for what, got_np, expected_np in multiply_and_compare(
            products, target, implementation=implementation
        ):
            difference = relative_error(got_np, expected_np)
            if not difference <= MAX_RELATIVE_ERROR:  # NaN is not
                return (
                    f"the product of {what} differs from XLA's by {difference:.3g} of its norm, "
                    f"more than {MAX_RELATIVE_ERROR}"
                )
    # As in `why_kernels_differ`: plain XLA can still serve.
    except Exception as error:
        logger.exception("a kernel failed")
        return f"running the product of experts raised {type(error).__name__}"
    return None
