"""A tiny model with `LoadedModel`'s interface that compiles fast, and its dense truth in NumPy."""

import types

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import pallas_kernels
from models import ForwardBatch, KVCache

VOCAB, HIDDEN, NUM_LAYERS, NUM_HEADS, HEAD_DIM = 50, 8, 2, 2, 4
MAX_POSITIONS = 256


class TinyModel:
    """Embeddings and attention layers without norms or MLPs; reads and writes the paged cache."""

    config = types.SimpleNamespace(
        vocab_size=VOCAB, num_layers=NUM_LAYERS, num_kv_heads=NUM_HEADS, head_dim=HEAD_DIM
    )

    def __init__(self, seed: int = 0, dtype: str = "float32") -> None:
        rng = np.random.default_rng(seed)
        shapes = [(VOCAB, HIDDEN), (MAX_POSITIONS, HIDDEN), (HIDDEN, VOCAB)]
        shapes += [(3, HIDDEN, NUM_HEADS * HEAD_DIM)] * NUM_LAYERS
        self.params = tuple(
            jax.device_put(rng.normal(size=s).astype(np.float32)).astype(dtype) for s in shapes
        )

    @property
    def param_specs(self) -> tuple[PartitionSpec, ...]:
        return (PartitionSpec(),) * len(self.params)

    def forward(self, params, kv_cache: KVCache, batch: ForwardBatch):
        num_rows, num_blocks, _, block_size, _ = kv_cache.k.shape
        hidden = params[0][batch.token_ids] + params[1][batch.positions]
        slots = pallas_kernels.slot_mapping(
            batch.positions[None],
            batch.block_tables,
            batch.query_start_loc,
            block_size=block_size,
            pad_slot=pallas_kernels.pad_slot(num_rows, num_blocks, block_size),
        )[0]
        for layer_idx in range(NUM_LAYERS):
            q, k, v = ((hidden @ w).reshape(-1, NUM_HEADS, HEAD_DIM) for w in params[3 + layer_idx])
            k_cache, v_cache = pallas_kernels.kv_scatter(
                kv_cache.k, kv_cache.v, k, v, slots, layer_idx
            )
            kv_cache = KVCache(k=k_cache, v=v_cache)
            hidden = hidden + _attend(q, kv_cache, batch, layer_idx).reshape(hidden.shape)
        return hidden, kv_cache

    def compute_logits(self, params, hidden):
        return (hidden @ params[2]).astype(jnp.float32)

    def dense_logits(self, token_ids: list[int]) -> np.ndarray:  # f64[num_tokens, vocab]
        """The whole sequence at once, without a cache."""
        params = [np.asarray(jax.device_get(p), np.float64) for p in self.params]
        num_tokens = len(token_ids)
        hidden = params[0][token_ids] + params[1][:num_tokens]
        for w in params[3:]:
            q, k, v = (np.reshape(hidden @ x, (num_tokens, NUM_HEADS, HEAD_DIM)) for x in w)
            scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(HEAD_DIM)
            scores += np.triu(np.full((num_tokens, num_tokens), -np.inf), 1)
            probs = np.exp(scores - scores.max(-1, keepdims=True))
            probs /= probs.sum(-1, keepdims=True)
            hidden = hidden + np.einsum("hqk,khd->qhd", probs, v).reshape(num_tokens, HIDDEN)
        return hidden @ params[2]


def _attend(q: jax.Array, kv_cache: KVCache, batch: ForwardBatch, row: int) -> jax.Array:
    """Every token attends to all positions up to its own, gathered through its block table."""
    block_tables = batch.block_tables[0]
    num_reqs, num_blocks = block_tables.shape[0], kv_cache.k.shape[1]
    tokens = jnp.arange(q.shape[0])
    req = jnp.searchsorted(batch.query_start_loc[1:], tokens, side="right")
    blocks = block_tables[jnp.minimum(req, num_reqs - 1)] + row * num_blocks

    def gathered(cache):  # -> f[num_tokens, num_heads, max_len, head_dim]
        pages = cache.reshape(-1, *cache.shape[2:])[blocks]
        return pages.swapaxes(1, 2).reshape(q.shape[0], NUM_HEADS, -1, HEAD_DIM)

    k, v = gathered(kv_cache.k), gathered(kv_cache.v)
    scores = jnp.einsum("thd,thsd->ths", q, k) / np.sqrt(HEAD_DIM)
    is_seen = jnp.arange(k.shape[2])[None, :] <= batch.positions[:, None]
    probs = jax.nn.softmax(jnp.where(is_seen[:, None], scores, -jnp.inf))
    return jnp.einsum("ths,thsd->thd", probs, jnp.where(is_seen[:, None, :, None], v, 0.0))
