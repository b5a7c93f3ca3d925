"""The sampler's program updates its arrays in place, without copies."""

import jax
import jax.numpy as jnp
import pytest

from paxkv.runner.sampling.row_state import (
    abstract_row_state,
    num_row_words,
    vocab_words,
    write_row,
)
from paxkv.runner.sampling.sampler_program import make_sampler
from paxkv.runner.shapes.program_shapes import RowShape, SamplerShape
from paxkv.runner.shapes.sampling_row import step_row_width
from tests.compiler_flags import AS_FOR_USERS

NUM_ROWS, VOCAB = 8, 300
# Histories far larger than all else together.
MAX_MODEL_LEN = 1_000_000


def abstract(*dims, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(dims, dtype)


def abstract_state():
    shape = RowShape(num_rows=NUM_ROWS, max_model_len=MAX_MODEL_LEN)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return abstract_row_state(shape, VOCAB, sharding)


def num_bytes(*arrays):
    return sum(array.size * array.dtype.itemsize for array in arrays)


@pytest.mark.parametrize("chunk_rows", [3, pytest.param(NUM_ROWS, marks=pytest.mark.slow)])
def test_logits_and_histories_are_updated_in_place(chunk_rows):
    shape = SamplerShape(
        num_rows=NUM_ROWS, num_reqs=NUM_ROWS, max_model_len=MAX_MODEL_LEN, chunk_rows=chunk_rows
    )
    logits, state = abstract(NUM_ROWS, VOCAB, dtype=jnp.float32), abstract_state()
    lowered = jax.jit(make_sampler(shape, None), donate_argnums=(0, 1)).lower(
        logits,
        state,
        abstract(NUM_ROWS, step_row_width(1)),
        abstract(NUM_ROWS, 1 + vocab_words(VOCAB)),
    )
    analysis = lowered.compile(AS_FOR_USERS).memory_analysis()
    assert analysis.alias_size_in_bytes >= num_bytes(logits, *jax.tree.leaves(state))
    # Not even one row of them.
    assert analysis.temp_size_in_bytes < 4 * MAX_MODEL_LEN


def test_row_is_written_in_place():
    state = abstract_state()
    packed = abstract(num_row_words(MAX_MODEL_LEN, VOCAB))
    analysis = (
        jax.jit(write_row, donate_argnums=0)
        .lower(state, packed)
        .compile(AS_FOR_USERS)
        .memory_analysis()
    )
    assert analysis.alias_size_in_bytes >= num_bytes(*jax.tree.leaves(state))
    assert analysis.temp_size_in_bytes <= 2 * num_bytes(packed)
