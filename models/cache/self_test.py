"""`SelfTest`: checks on the device that the ops of a cache agree with plain XLA."""

from typing import Protocol

import numpy as np

import pallas_kernels

# Double rounding in 16 bits stays below this. A wrong mask or a lost tile is far above.
MAX_RELATIVE_ERROR = 2e-2


class AttentionRules(Protocol):
    """The fields of a layer's `AttentionConfig` that a self-test depends on."""

    @property
    def num_q_heads(self) -> int: ...

    @property
    def scale(self) -> float: ...

    @property
    def sliding_window(self) -> int | None: ...

    @property
    def chunk_size(self) -> int | None: ...

    @property
    def soft_cap(self) -> float | None: ...

    @property
    def has_sinks(self) -> bool: ...


class SelfTest(Protocol):
    """Runs the ops of one cache with small random inputs. Frozen: equal tests run only once."""

    def why_kernels_differ(
        self, target: pallas_kernels.Target, *, implementation: str | None = None
    ) -> str | None:
        """Compares `implementation` with plain XLA. Errors of compilers and devices are raised.

        Args:
            implementation: As in the ops of `pallas_kernels`.

        Returns:
            What differs; None if nothing does.
        """


def relative_error(got_np: np.ndarray, expected_np: np.ndarray) -> float:
    """`|got - expected| / |expected|`, norms over all entries."""
    norm = float(np.linalg.norm(expected_np))
    return float(np.linalg.norm(got_np - expected_np)) / (norm or 1.0)
