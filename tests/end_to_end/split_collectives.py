"""Checks of what compiled programs of several devices exchange, and of what they copy."""

import collections
import json
import math
import re
import tempfile
from pathlib import Path

from paxkv.runner.memory.device_mesh import find_mesh
from paxkv.runner.shapes.program_shapes import StepShape
from tests.end_to_end.engine_harness import MAX_DECODE_BURST, MAX_NUM_SEQS, RecordingRunner
from tests.end_to_end.split_configs import CONFIGS, LIMITS


def check_collectives(recording: RecordingRunner) -> None:
    """Programs exchange two sums per layer and one for the embedding.

    Bursts also exchange numbers of the rows that draw.
    """
    runner = recording.runner
    config = runner.worker.programs._model.config
    for shape, program in runner.worker.programs._programs.items():
        num_sums = collections.Counter()
        for computation, operation, dims in collectives(program.as_text()):
            if (operation, dims[-1]) == ("all-reduce", config.hidden_size):
                num_sums[computation] += 1
                continue
            assert not isinstance(shape, StepShape), (operation, dims)
            # Results contain the logits here (`RecordingRunner`).
            assert dims[-1] <= 2 * config.vocab_size, (operation, dims)
            assert math.prod(dims[:-1]) <= MAX_DECODE_BURST * MAX_NUM_SEQS, (operation, dims)
        # The entry of a step may have the last layer and the embedding. On a CPU, other layers are
        # in loops or conditions. A burst may have several layers in one computation.
        if isinstance(shape, StepShape):
            assert 2 <= max(num_sums.values()) <= 3, (shape, num_sums)
    check_cache_in_place(recording)


def check_cache_in_place(recording: RecordingRunner) -> None:
    """No program copies the cache of a device."""
    worker = recording.runner.worker
    cache_bytes = worker.kv_cache.addressable_shards[0].data.nbytes
    for shape, program in worker.programs._programs.items():
        memory = program.memory_analysis()
        if hasattr(shape, "tables"):
            assert memory.alias_size_in_bytes >= cache_bytes, shape
        assert memory.temp_size_in_bytes < cache_bytes / 2, shape


def collectives(hlo: str) -> list[tuple[str, str, list[int]]]:
    found, computation = [], ""
    for line in hlo.splitlines():
        if line.startswith(("%", "ENTRY")):
            computation = line.split("(")[0]
        if match := re.search(
            r"= \w+\[([0-9,]*)\]\S* "
            r"(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(",
            line,
        ):
            dims = [int(size) for size in match[1].split(",") if size]
            found.append((computation, match[2], dims))
    return found


def check_state_collectives(num_devices: int) -> None:
    """A recurrent layer sums the squares of its norm, and the outputs of its last product."""
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(CONFIGS["mamba2"]))
    options = LIMITS | {"load_format": "dummy", "mesh": find_mesh(num_devices)}
    runner = RecordingRunner(folder, 16, **options).runner
    model = runner.worker.programs._model
    shape = next(shape for shape in runner._buckets.largest if isinstance(shape, StepShape))
    program = runner.worker.programs.compile(shape, runner.worker.kv_cache)
    found = {(operation, *dims) for _, operation, dims in collectives(program.as_text())}
    assert {(operation, dims[-1]) for operation, *dims in found} == {
        ("all-reduce", model.config.hidden_size),
        ("all-reduce", 1),
    }
