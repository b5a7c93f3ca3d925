"""Compares results with expected values: by the norm of the array or of rows, or bit by bit."""

import numpy as np

from benchmarks.units.unit import Finding

# Largest relative error of a correct body, in the norm, by the dtype in which it computes.
ERROR_LIMITS = {"bfloat16": 1e-2, "float16": 5e-3, "float32": 1e-5}
# One wrong row among many hardly changes the norm of the array, so each row has a limit too.
ROW_LIMIT_FACTOR = 10.0


def relative_error(got: np.ndarray, wanted: np.ndarray) -> float:
    """||got - wanted|| / ||wanted|| in float64, or ||got|| if all of `wanted` is 0.

    Raises:
        ValueError: The shapes differ.
    """
    if got.shape != wanted.shape:
        raise ValueError(f"shapes differ: got {got.shape}, wanted {wanted.shape}")
    norm = np.linalg.norm(wanted)
    return float(np.linalg.norm(got.astype(np.float64) - wanted) / (norm if norm > 0 else 1.0))


def close_findings(what: str, got: np.ndarray, wanted: np.ndarray, limit: float) -> list[Finding]:
    """Compares an array as a whole, and each of its rows (the last axis)."""
    norms = np.linalg.norm(wanted, axis=-1)
    errors = np.linalg.norm(got.astype(np.float64) - wanted, axis=-1)
    worst_row = float(np.max(errors / np.where(norms > 0, norms, 1.0), initial=0.0))
    return [
        Finding(what=what, error=relative_error(got, wanted), limit=limit),
        Finding(what=f"worst row of {what}", error=worst_row, limit=ROW_LIMIT_FACTOR * limit),
    ]


def same_finding(what: str, got: np.ndarray, wanted: np.ndarray) -> Finding:
    """Counts the entries that differ; NaN equals NaN.

    Raises:
        ValueError: The shapes or dtypes differ.
    """
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        raise ValueError(
            f"{what}: got {got.dtype}{list(got.shape)}, wanted {wanted.dtype}{list(wanted.shape)}"
        )
    width = {1: np.uint8, 2: np.uint16, 4: np.uint32}[got.dtype.itemsize]
    got, wanted = np.ascontiguousarray(got), np.ascontiguousarray(wanted)
    # Bits first: comparing the 8- and 16-bit floats of a whole cache takes seconds.
    differs = got.view(width) != wanted.view(width)
    got, wanted = got[differs], wanted[differs]
    # NumPy has no isnan for 8-bit floats.
    num_wrong = np.count_nonzero(~((got != got) & (wanted != wanted)))
    return Finding(what=what, error=float(num_wrong), limit=0.0)
