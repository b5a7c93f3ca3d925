"""`ForwardBatch` and `KVCache` travel through jit."""

import jax
import jax.numpy as jnp
import numpy as np

from models.forward_batch import ForwardBatch, KVCache


def test_batch_without_a_plan_is_six_arrays():
    batch = ForwardBatch(
        token_ids=np.zeros(4, np.int32),
        positions=np.zeros(4, np.int32),
        query_start_loc=np.zeros(3, np.int32),
        seq_lens=np.zeros((1, 2), np.int32),
        block_tables=np.zeros((1, 2, 5), np.int32),
        logits_indices=np.zeros(2, np.int32),
    )
    assert len(jax.tree.leaves(batch)) == 6
    assert jax.jit(lambda b: b)(batch).block_tables.shape == (1, 2, 5)


def test_plan_of_the_backend_travels_with_the_batch():
    arrays = {name: np.zeros(1, np.int32) for name in ("token_ids", "positions", "logits_indices")}
    batch = ForwardBatch(
        **arrays,
        query_start_loc=np.zeros(2, np.int32),
        seq_lens=np.zeros((1, 1), np.int32),
        block_tables=np.zeros((1, 1, 1), np.int32),
        attention_plan=({"tiles": np.arange(3)},),
    )
    doubled = jax.jit(lambda b: jax.tree.map(lambda x: x * 2, b))(batch)
    assert doubled.attention_plan[0]["tiles"].tolist() == [0, 2, 4]


def test_donated_cache_is_consumed():
    kv_cache = KVCache(k=jnp.zeros((1, 2, 1, 4, 8)), v=jnp.zeros((1, 2, 1, 4, 8)))
    old = kv_cache
    kv_cache = jax.jit(lambda c: jax.tree.map(lambda x: x + 1, c), donate_argnums=0)(kv_cache)
    assert old.k.is_deleted() and old.v.is_deleted()
    assert float(kv_cache.v.sum()) == 64
