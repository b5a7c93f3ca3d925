"""A request finds only its own last computation of the head, and only just after it."""

import jax
import numpy as np
import pytest

from paxkv.runner.features.head_memory import (
    HeadMemory,
    head_memory_arrays,
    read_memory,
    write_memory,
)
from tests.quick_compile import quick_jit

NUM_ROWS, HIDDEN = 4, 6
READ, WRITE = quick_jit(read_memory), quick_jit(write_memory)


def random_memory(seed, *, has_drafts, positions):
    rng = np.random.default_rng(seed)
    shape = (len(positions), HIDDEN)
    return HeadMemory(
        has_drafts=np.array(has_drafts),
        positions=np.array(positions, np.int32),
        token_ids=rng.integers(0, 48, len(positions), np.int32),
        hidden=rng.normal(size=shape).astype(np.float32),
        next_hidden=rng.normal(size=shape).astype(np.float32),
        draft_ids=rng.integers(0, 48, len(positions), np.int32),
    )


@pytest.fixture
def kept():
    """Row 2 has the tenancy 5 and row 0 the tenancy 6. The request of row 3 drew no token."""
    arrays = head_memory_arrays(num_rows=NUM_ROWS, hidden_size=HIDDEN, dtype="float32")
    zeros = {name: np.zeros(array.dims, array.dtype) for name, array in arrays.items()}
    written = random_memory(1, has_drafts=[True, True, False], positions=[10, 7, 3])
    return WRITE(zeros, np.array([[2, 0, 3], [5, 6, 9]], np.int32), written), written


def test_requests_find_their_computation_in_another_order(kept):
    arrays, written = kept
    found = READ(arrays, np.array([[0, 2], [6, 5]], np.int32), np.array([8, 11], np.int32))
    expected = jax.tree.map(lambda array: array[np.array([1, 0])], written)
    for name, array, expected_array in zip(HeadMemory._fields, found, expected, strict=True):
        assert array.tolist() == expected_array.tolist(), name


@pytest.mark.parametrize(
    ("row", "tenancy", "position"),
    [(2, 7, 11), (0, 5, 8), (2, 5, 12), (2, 5, 10), (3, 9, 4), (1, 3, 1), (1, 0, 0)],
    ids=[
        *("later_request", "request_of_another_row", "later_token", "earlier_token"),
        *("no_token_drawn", "never_written", "no_request"),
    ],
)
def test_other_computations_give_no_drafts(kept, row, tenancy, position):
    tenancies_np = np.array([[row, 2], [tenancy, 5]], np.int32)
    found = READ(kept[0], tenancies_np, np.array([position, 11], np.int32))
    assert found.has_drafts.tolist() == [False, True]
    # The head may write there, because the next step does.
    assert found.positions.tolist() == [position, 10]
