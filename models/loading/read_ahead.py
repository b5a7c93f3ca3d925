"""Reads the weights of a checkpoint with several threads, ahead of their use."""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from tqdm import tqdm

from models.loading.checkpoint import Checkpoint
from models.loading.finite_weights import checked_finite
from models.loading.quantized import DequantizedCheckpoint
from models.loading.quantized.packed_integers import ScaledIntegers, widen_numbers
from models.weight_rule import Source, WeightRule

# Several readers get more bytes per second from a disk or a network than one does, even with fewer
# processors.
_NUM_READERS = 4
# Readers run ahead until the weights that were read need this much memory. This keeps them busy,
# and is a small part of a model.
_MAX_BYTES_AHEAD = 128 * 2**20
_ITEM_BYTES = {"F64": 8, "F32": 4}


def read_ahead(
    checkpoint: Checkpoint, rules: Sequence[WeightRule], kept: Sequence[bool]
) -> Iterator[list[np.ndarray] | list[ScaledIntegers]]:
    """The sources of each rule, in order, and a progress bar if stderr is a terminal.

    The memory of a rule's sources is released when the caller asks for the next ones.

    Args:
        kept: Of each rule, whether its quantized numbers are read as they are stored.

    Raises:
        CheckpointError: Numbers are not finite, or a weight cannot be dequantized.
    """

    def read(rule: WeightRule, is_kept: bool) -> list[np.ndarray] | list[ScaledIntegers]:
        if is_kept:
            return [_read_integers(checkpoint, source.name) for source in rule.sources]
        return [_read(checkpoint, source) for source in rule.sources]

    sizes = [_num_bytes(checkpoint, rule) for rule in rules]
    waiting = deque(zip(rules, kept, sizes, strict=True))
    ahead: deque[tuple[WeightRule, int, Future]] = deque()
    num_bytes_ahead = 0
    progress = tqdm(
        total=sum(sizes), desc="Loading weights", unit="B", unit_scale=True, disable=None
    )
    pool = ThreadPoolExecutor(_NUM_READERS)
    try:
        while waiting or ahead:
            while waiting and (len(ahead) < 2 or num_bytes_ahead < _MAX_BYTES_AHEAD):
                rule, is_kept, size = waiting.popleft()
                ahead.append((rule, size, pool.submit(read, rule, is_kept)))
                num_bytes_ahead += size
            rule, size, reading = ahead.popleft()
            yield reading.result()
            del reading  # it holds the arrays
            for source in rule.sources:
                checkpoint.release(source.name)
            num_bytes_ahead -= size
            progress.update(size)
    finally:
        # After an error, reads that have not started are dropped.
        pool.shutdown(cancel_futures=True)
        progress.close()


def _num_bytes(checkpoint: Checkpoint, rule: WeightRule) -> int:
    """Of the rule's sources as `Checkpoint.read` returns them."""
    weights = [checkpoint.weights[source.name] for source in rule.sources]
    return sum(math.prod(weight.shape) * _ITEM_BYTES.get(weight.dtype, 2) for weight in weights)


def _read(checkpoint: Checkpoint, source: Source) -> np.ndarray:
    stored, weight_np = checkpoint.weights[source.name], checkpoint.read(source.name)
    if source.is_integer:
        return weight_np
    return checked_finite(weight_np, name=stored.name, where=str(stored.path))


def _read_integers(checkpoint: DequantizedCheckpoint, name: str) -> ScaledIntegers:
    stored, integers = checkpoint.weights[name], checkpoint.read_integers(name)
    checked_finite(integers.scales, name=stored.name, where=str(stored.path))
    if integers.code != "integer":
        floats = widen_numbers(integers.numbers, np.float32(1), 0, integers.code)
        checked_finite(floats, name=stored.name, where=str(stored.path))
    return integers
