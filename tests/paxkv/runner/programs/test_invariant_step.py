"""Batch-invariant steps keep the drafts of a request in one tile if the model has states."""

import functools
import random

import jax
import numpy as np

from paxkv.runner.programs.invariant_step import _end_of_tile, _state_rows_of_tile
from paxkv.runner.shapes.program_shapes import StepShape

TILE = 5
MAX_REQS = 4
SHAPE = StepShape(
    num_tokens=60,
    num_reqs=MAX_REQS + 1,
    num_logits=60,
    logits="indices",
    max_draws=1 + TILE,
    tables=(),
    tile_tokens=TILE,
)


def test_tiles_end_before_drafts_that_do_not_fit():
    end_of_tile = jax.jit(functools.partial(_end_of_tile, shape=SHAPE))
    state_rows_of_tile = jax.jit(functools.partial(_state_rows_of_tile, shape=SHAPE))
    rng = random.Random(0)
    for _ in range(30):
        counts = [
            (rng.randint(1, 9), rng.randint(0, TILE)) for _ in range(rng.randint(1, MAX_REQS))
        ]
        starts = np.cumsum([0, *map(sum, counts)])
        num_empty = MAX_REQS + 1 - len(counts)
        empty = [0] * num_empty
        fields = {
            "query_start_loc": np.append(starts, [starts[-1]] * num_empty).astype(np.int32),
            "state_ends": np.append(starts[1:] - [n for _, n in counts], empty).astype(np.int32),
            "seq_lens": np.append(np.diff(starts) + 7, empty).astype(np.int32),
        }
        written = [7] * len(counts)
        start = 0
        while start < starts[-1]:
            end = int(end_of_tile(fields, np.int32(start)))
            assert start < end <= start + TILE
            rows = state_rows_of_tile(fields, np.int32(start), np.int32(end))
            loc, state_ends = np.asarray(rows.query_start_loc), np.asarray(rows.state_ends)
            for req in range(len(counts)):
                if loc[req] == loc[req + 1]:
                    continue
                # The tile reads the state that earlier tiles wrote, and no draft was among them.
                assert rows.num_computed[req] == written[req]
                assert bool(rows.reads_second[req]) == (written[req] > 7)
                assert loc[req] <= state_ends[req] <= loc[req + 1]
                written[req] += int(state_ends[req] - loc[req])
            start = end
        assert written == [7 + num_known for num_known, _ in counts]
