"""Sizes of blocks that TMA can copy or not, for tests of `block_gather` and `block_scatter`."""

from pallas_kernels.tma_boxes import COPYABLE_DTYPES

# Each value at least once; the values one at a time run with `pytest -m slow`.
FITTING = [
    {"block_dims": (2, 8, 8, 64), "dtype": "float32"},
    {"block_dims": (2, 8, 64, 96), "dtype": "float16"},
    {"block_dims": (2, 8, 256, 192), "dtype": "int8"},
    {"num_ids": 100_000, "block_dims": (2, 8, 16, 256), "dtype": "float8_e4m3fn"},
    {"block_dims": (2, 1, 8, 80)},
    {"block_dims": (2 * 8 * 16 * 128,), "dtype": "uint16"},
    {"block_dims": (16, 576)},
]
SLOW_FITTING = [
    *({"block_dims": (2, 8, block_size, 128)} for block_size in (8, 64, 256)),
    *({"block_dims": (2, 8, 16, head_dim)} for head_dim in (64, 80, 96, 192, 256)),
    *({"dtype": dtype} for dtype in COPYABLE_DTYPES),
    {"num_ids": 100_000},
]
# Sizes that do not fit, and the reason.
UNFIT = [
    ({"num_ids": 0}, "there is nothing to copy"),
    ({"dtype": "bool"}, "got bool"),
    ({"block_dims": (64,)}, "cannot be cut into TMA boxes"),
]
