"""The device's copy bandwidth, which shares of the memory roofline are taken of."""

from typing import Any

import jax

from benchmarks.gpu.sizes import sizes_of
from benchmarks.ops.gpu_machine import measure_add_one, measure_copy

BUDGET_S = 1.5


class MachineSubject:
    """The default device of JAX."""

    def __init__(self, *, is_rehearsal: bool) -> None:
        self._num_bytes = sizes_of(is_rehearsal=is_rehearsal).num_copied_bytes
        jax.devices()

    def copy(self, *, seed: int) -> dict[str, Any]:
        """Bytes read and written a second, by the better of two programs."""
        rates = {}
        for name, measure in (("copy", measure_copy), ("add_one", measure_add_one)):
            taken = measure(num_copied_bytes=self._num_bytes, seed=seed, budget_s=BUDGET_S)
            rates[name] = [2 * self._num_bytes / s / 1e9 for s in taken["samples_s"]]
        best = max(rates.values(), key=lambda samples: sorted(samples)[len(samples) // 2])
        return {"figures": {"copy_gb_per_s": best}}
