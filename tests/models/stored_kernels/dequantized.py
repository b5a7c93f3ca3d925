"""The numbers that a `ScaledKernel` stands for, unpacked one group at a time."""

import ml_dtypes
import numpy as np

from models.stored_kernels.scaled import ScaledKernel

# Formats of floats -> as `ml_dtypes` reads their bits.
FLOATS = {"e4m3": ml_dtypes.float8_e4m3fn, "e2m1": ml_dtypes.float4_e2m1fn}


def dequantized(kernel: ScaledKernel) -> np.ndarray:  # f32[..., in_features, out_features]
    """Computes `(number - zero) * scale` in float32."""
    numbers_np, scales_np = np.asarray(kernel.numbers), np.asarray(kernel.scales)
    if scales_np.dtype == np.uint8:
        scales_np = scales_np.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    zeros_np = None if kernel.zeros is None else np.asarray(kernel.zeros)
    if numbers_np.ndim == 5:
        parts = [
            ScaledKernel(
                numbers_np[expert],
                scales_np[expert],
                None if zeros_np is None else zeros_np[expert],
                kernel.number_format,
                kernel.out_features,
            )
            for expert in range(len(numbers_np))
        ]
        return np.stack([dequantized(part) for part in parts])
    panels = []
    for panel_idx, panel_np in enumerate(numbers_np):
        groups = []
        for group_idx, group_np in enumerate(panel_np):
            zero_np = np.float32(8 if kernel.number_format == "int4" else 0)
            if kernel.number_format in ("int4", "e2m1"):
                group_np = np.concatenate([group_np % 16, group_np // 16])
            if kernel.number_format in FLOATS:
                group_np = group_np.view(FLOATS[kernel.number_format])
            if zeros_np is not None:
                zero_np = zeros_np[panel_idx, group_idx].astype(np.float32)
            groups.append((group_np.astype(np.float32) - zero_np) * scales_np[panel_idx, group_idx])
        panels.append(np.concatenate(groups))
    return np.concatenate(panels, axis=1)[:, : kernel.out_features]
