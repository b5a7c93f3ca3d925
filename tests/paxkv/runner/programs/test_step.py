"""The compiled step writes the cache in place, and takes tokens from the host or the device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import load_model
from paxkv.runner.programs.step import make_block_copies, make_step, unpack_batch, unpack_fields
from paxkv.runner.shapes.packed_layout import PackedLayout
from paxkv.runner.shapes.program_shapes import StepShape, TableShape
from tests.compiler_flags import AS_FOR_USERS
from tests.oracles.make_checkpoint import write_random_checkpoint
from tests.oracles.placed_model import place_model
from tests.paxkv.runner.tiny_model import HEAD_DIM, NUM_HEADS, TinyModel

TABLE = TableShape(num_groups=1, max_blocks_per_req=4, block_size=8)
SHAPE = StepShape(num_tokens=8, num_reqs=4, num_logits=4, logits="last", tables=(TABLE,))


def abstract(*dims, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(dims, dtype)


# The smallest step and a larger one: XLA rewrites tiny scatters and gathers in other ways.
TINY_SHAPE = dataclasses.replace(SHAPE, num_tokens=1, num_reqs=1, num_logits=1, logits="indices")
# One byte of temporary memory per block would show in a cache of this many blocks: a program that
# is compiled once shows what two caches of different sizes would.
NUM_BLOCKS = 2**20


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = write_random_checkpoint(tmp_path_factory.mktemp("llama"), num_layers=2)
    return load_model(folder)


def abstract_pages(placed, num_blocks):
    return jax.eval_shape(lambda: placed.empty_pages(num_blocks))


def check_step_is_in_place(placed, shape, pages):
    """The whole cache is aliased, and temporary memory does not grow with it."""
    model = placed.model
    cache_bytes = pages.size * pages.dtype.itemsize
    logits = abstract(4, model.config.vocab_size, dtype=jnp.float32)
    packed = abstract(PackedLayout(shape).num_words)
    step = jax.jit(make_step(model, shape), donate_argnums=(1, 4))
    lowered = step.lower(model.params, pages, packed, abstract(4), logits)
    analysis = lowered.compile(AS_FOR_USERS).memory_analysis()
    assert analysis.alias_size_in_bytes >= cache_bytes + 4 * logits.size
    assert analysis.temp_size_in_bytes < NUM_BLOCKS


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        pytest.param(TINY_SHAPE, "float32", id="1_token-f32", marks=pytest.mark.slow),
        pytest.param(TINY_SHAPE, "bfloat16", id="1_token-bf16"),
        pytest.param(SHAPE, "float32", id="8_tokens-f32", marks=pytest.mark.slow),
        pytest.param(SHAPE, "float16", id="8_tokens-f16", marks=pytest.mark.slow),
        pytest.param(SHAPE, "bfloat16", id="8_tokens-bf16", marks=pytest.mark.slow),
    ],
)
def test_step_writes_the_cache_in_place(llama, shape, dtype):
    placed = place_model(llama, block_size=8, dtype=dtype)
    pages = abstract_pages(placed, NUM_BLOCKS)
    # Of two layers: K and V of two heads.
    assert pages.shape == (2, NUM_BLOCKS, 2 * 2 * 8 * 16)
    check_step_is_in_place(placed, shape, pages)


@pytest.mark.parametrize(
    "shape", [TINY_SHAPE, pytest.param(SHAPE, marks=pytest.mark.slow)], ids=["1_token", "8_tokens"]
)
def test_step_of_two_groups_writes_their_one_cache_in_place(shape):
    placed = place_model(TinyModel(windows=(16, None)), block_size=8)
    pages = abstract_pages(placed, NUM_BLOCKS)
    assert pages.shape == (1, NUM_BLOCKS, 2 * NUM_HEADS * 8 * HEAD_DIM)
    tables = (dataclasses.replace(TABLE, num_groups=2),)
    check_step_is_in_place(placed, dataclasses.replace(shape, tables=tables), pages)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.uint16], ids=["f32", "u16"])
def test_block_copies_write_the_cache_in_place(dtype):
    pages = abstract(3, 2048, 2 * 2 * 8 * 16, dtype=dtype)
    cache_bytes = pages.size * pages.dtype.itemsize
    lowered = jax.jit(make_block_copies(TinyModel()), donate_argnums=0).lower(pages, abstract(2, 8))
    analysis = lowered.compile(AS_FOR_USERS).memory_analysis()
    assert analysis.alias_size_in_bytes >= cache_bytes
    assert analysis.temp_size_in_bytes < cache_bytes / 50


def test_token_source_chooses_between_host_and_device():
    layout = PackedLayout(SHAPE)
    packed_np = np.zeros(layout.num_words, np.int32)
    views = layout.views(packed_np)
    views["token_ids"][:] = np.arange(10, 18)
    views["token_source"][:] = [4, 0, 3, 4, 4, 1, 4, 4]
    prev_tokens = np.array([50, 51, 52, 53], np.int32)

    def unpack(packed, prev_tokens):
        return unpack_batch(unpack_fields(layout, packed, prev_tokens), SHAPE)

    batch = jax.jit(unpack)(packed_np, prev_tokens)
    assert batch.token_ids.tolist() == [10, 50, 53, 13, 14, 51, 16, 17]
