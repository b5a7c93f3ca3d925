"""Checks when an engine starts that the kernels for its device compute what plain XLA computes.

Most tests of a kernel run without the device that it is written for. So an engine runs small random
inputs in the shapes of its model when it starts. If the kernels are wrong, it logs an error and
uses plain XLA.
"""

import dataclasses
import logging
from collections.abc import Iterable
from typing import NamedTuple

import jax

import pallas_kernels
from models.cache.self_test import SelfTest
from pallas_kernels.dispatch import collect_misfits, target_misfit
from paxkv.runner.programs.expert_check import CheckedProduct
from paxkv.runner.programs.scaled_check import CheckedScaledProduct

logger = logging.getLogger(__name__)


class KernelChoice(NamedTuple):
    """The implementation of the operations on the KV cache.

    Args:
        implementation: The `implementation` that the model passes to every op: "xla", or None if
            each op chooses for itself.
        why_no_kernels: The reason, as a sentence, if all ops run as plain XLA; otherwise None.
        ops_without_kernels: If kernels run: a sentence for each op that runs as plain XLA.
    """

    implementation: str | None
    why_no_kernels: str | None = None
    ops_without_kernels: tuple[str, ...] = ()


def choose_implementation(
    kernels: str,
    tests: Iterable[SelfTest],
    products: Iterable[CheckedProduct],
    scaled_products: Iterable[CheckedScaledProduct],
    device: jax.Device,
) -> KernelChoice:
    """Chooses between plain XLA and the kernels for a device.

    Args:
        kernels: `RunnerConfig.kernels`.
        tests: The tests of the model's caches.
        products: The products of the model's layers with experts.
        scaled_products: The products with quantized matrices.
    """
    target = pallas_kernels.target_of(device)
    if kernels == "xla":
        return KernelChoice("xla", "--kernels xla is set.")
    misfit = target_misfit(target)
    if misfit is not None:
        return KernelChoice(None, f"{misfit}.")  # dispatch chooses XLA by itself
    with collect_misfits() as misfits:
        reason = why_kernels_differ(tests, target)
        for tested, own in (
            ("the product of experts", products),
            ("the product with quantized matrices", scaled_products),
        ):
            reason = reason or why_kernels_differ(
                sorted(own, key=dataclasses.astuple), target, tested=tested
            )
    if reason is None:
        return KernelChoice(None, None, tuple(misfits))
    logger.error(
        "plain XLA replaces the kernels for %s: %s. Please report this line, the model, and the "
        "versions of jax and of the driver.",
        target.device_kind,
        reason,
    )
    return KernelChoice("xla", f"the kernels failed the check at the start: {reason}.")


def why_kernels_differ(
    tests: Iterable[SelfTest],
    target: pallas_kernels.Target,
    *,
    implementation: str | None = None,
    tested: str = "them",
) -> str | None:
    """Runs each test once, with `implementation`. Equal tests count as one.

    Args:
        tested: The words for the tested operations in the message about an error.

    Returns:
        A description of the first difference from plain XLA; None if there is none.
    """
    for test in dict.fromkeys(tests):
        try:
            reason = test.why_kernels_differ(target, implementation=implementation)
        # Plain XLA can still serve, whatever fails in a compiler or on the device.
        except Exception as error:
            logger.exception("a kernel failed")
            return f"running {tested} raised {type(error).__name__}"
        if reason is not None:
            return reason
    return None
