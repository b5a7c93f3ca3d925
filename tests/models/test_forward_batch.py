"""`ForwardBatch` and `KVCache` travel through jit."""

import jax
import jax.numpy as jnp
import numpy as np

from models.forward_batch import ForwardBatch, KVCache


def test_a_batch_is_six_arrays():
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


def test_donated_cache_is_consumed():
    kv_cache = KVCache(k=jnp.zeros((1, 2, 1, 4, 8)), v=jnp.zeros((1, 2, 1, 4, 8)))
    old = kv_cache
    kv_cache = jax.jit(lambda c: jax.tree.map(lambda x: x + 1, c), donate_argnums=0)(kv_cache)
    assert old.k.is_deleted() and old.v.is_deleted()
    assert float(kv_cache.v.sum()) == 64
