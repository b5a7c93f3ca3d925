"""One small engine of the demo model, for tests of what compiles programs or starts processes."""

import importlib.resources
from pathlib import Path

CHECKPOINT = Path(str(importlib.resources.files("models.demo") / "checkpoint"))
# One request at a time, steps of at most 16 tokens, and no bursts: six programs.
SETTINGS = {
    "block_size": 16,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 16,
    "num_gpu_blocks_override": 72,
    "max_decode_burst": 1,
}
FLAGS = tuple(
    text for name, value in SETTINGS.items() for text in (f"--{name.replace('_', '-')}", str(value))
)
