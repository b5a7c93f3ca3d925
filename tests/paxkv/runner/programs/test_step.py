"""The compiled step writes the cache in place, and takes tokens from the host or the device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import KVCache, load_model
from paxkv.runner.batch.packed_layout import PackedLayout
from paxkv.runner.programs.bucketing import StepShape
from paxkv.runner.programs.step import make_block_copies, make_step, unpack_batch
from tests.oracles.make_checkpoint import write_random_checkpoint
from tests.paxkv.runner.tiny_model import HEAD_DIM, NUM_HEADS, VOCAB, TinyModel

SHAPE = StepShape(num_tokens=8, num_reqs=4, num_logits=4, num_groups=1, max_blocks_per_req=4)


def abstract(*dims, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(dims, dtype)


# The smallest step and a larger one: XLA rewrites tiny scatters and gathers in other ways.
TINY_SHAPE = dataclasses.replace(SHAPE, num_tokens=1, num_reqs=1, num_logits=1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = write_random_checkpoint(tmp_path_factory.mktemp("llama"), num_layers=2)
    return load_model(folder)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16], ids=["f32", "f16"])
@pytest.mark.parametrize("shape", [TINY_SHAPE, SHAPE], ids=["1_token", "8_tokens"])
def test_step_writes_the_cache_in_place(llama, shape, dtype):
    """The whole cache is aliased, and temporary memory does not grow with it."""
    step = jax.jit(make_step(llama, shape), donate_argnums=(1, 4))
    logits = abstract(4, llama.config.vocab_size, dtype=jnp.float32)
    temp_bytes = []
    for num_blocks in (64, 2048):
        array = abstract(2, num_blocks, 2, 8, 16, dtype=dtype)
        cache_bytes = 2 * array.size * array.dtype.itemsize
        packed = abstract(PackedLayout(shape).num_words)
        lowered = step.lower(llama.params, KVCache(k=array, v=array), packed, abstract(4), logits)
        analysis = lowered.compile().memory_analysis()
        assert analysis.alias_size_in_bytes >= cache_bytes + 4 * logits.size
        temp_bytes.append(analysis.temp_size_in_bytes)
    assert temp_bytes[0] == temp_bytes[1] < cache_bytes / 4


@pytest.mark.parametrize("shape", [TINY_SHAPE, SHAPE], ids=["1_token", "8_tokens"])
def test_step_of_two_groups_writes_their_one_cache_in_place(shape):
    model = TinyModel(windows=(16, None))
    shape = dataclasses.replace(shape, num_groups=2)
    step = jax.jit(make_step(model, shape), donate_argnums=(1, 4))
    logits = abstract(4, VOCAB, dtype=jnp.float32)
    temp_bytes = []
    for num_blocks in (64, 2048):
        array = abstract(1, num_blocks, NUM_HEADS, 8, HEAD_DIM, dtype=jnp.float32)
        cache_bytes = 2 * array.size * array.dtype.itemsize
        packed = abstract(PackedLayout(shape).num_words)
        lowered = step.lower(model.params, KVCache(k=array, v=array), packed, abstract(4), logits)
        analysis = lowered.compile().memory_analysis()
        assert analysis.alias_size_in_bytes >= cache_bytes
        temp_bytes.append(analysis.temp_size_in_bytes)
    assert temp_bytes[0] == temp_bytes[1] < cache_bytes / 4


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16], ids=["f32", "f16"])
def test_block_copies_write_the_cache_in_place(dtype):
    array = abstract(3, 2048, 2, 8, 16, dtype=dtype)
    cache_bytes = 2 * array.size * array.dtype.itemsize
    lowered = jax.jit(make_block_copies(TinyModel()), donate_argnums=0).lower(
        KVCache(k=array, v=array), abstract(2, 8)
    )
    analysis = lowered.compile().memory_analysis()
    assert analysis.alias_size_in_bytes >= cache_bytes
    assert analysis.temp_size_in_bytes < cache_bytes / 50


def test_token_source_chooses_between_host_and_device():
    layout = PackedLayout(SHAPE)
    packed_np = np.zeros(layout.num_words, np.int32)
    views = layout.views(packed_np)
    views["token_ids"][:] = np.arange(10, 18)
    views["token_source"][:] = [4, 0, 3, 4, 4, 1, 4, 4]
    prev_tokens = jnp.array([50, 51, 52, 53], jnp.int32)
    batch = jax.jit(lambda p, t: unpack_batch(layout.unpack(p), t))(packed_np, prev_tokens)
    assert batch.token_ids.tolist() == [10, 50, 53, 13, 14, 51, 16, 17]
