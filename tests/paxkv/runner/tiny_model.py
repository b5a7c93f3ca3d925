"""A tiny model with `LoadedModel`'s interface that compiles fast, and its dense truth in NumPy."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import pallas_kernels
from models import (
    AttentionConfig,
    CachePlace,
    ForwardBatch,
    KernelSettings,
    KVCache,
    RopeConfig,
    kv_cache_layers,
)
from models.platforms import default_platform
from paxkv.runner.memory.kv_cache_groups import groups_of_layers

VOCAB, HIDDEN, NUM_LAYERS, NUM_HEADS, HEAD_DIM = 50, 8, 2, 2, 4
MAX_POSITIONS = 256


@dataclasses.dataclass(frozen=True)
class TinyConfig:
    """What of a model's configuration the runner reads."""

    attention: tuple[AttentionConfig, ...]
    vocab_size: int = VOCAB
    has_unified_kv: bool = False


def tiny_config(windows: tuple[int | None, ...]) -> TinyConfig:
    """Layers with these windows."""
    layer = AttentionConfig(
        hidden_size=HIDDEN,
        num_q_heads=NUM_HEADS,
        num_kv_heads=NUM_HEADS,
        head_dim=HEAD_DIM,
        rope=RopeConfig(),  # which it does without
        scale=HEAD_DIM**-0.5,
    )
    return TinyConfig(tuple(dataclasses.replace(layer, sliding_window=w) for w in windows))


class TinyModel:
    """Embeddings and attention layers without norms or MLPs; reads and writes the paged cache.

    Args:
        windows: Sliding window of each layer; layers of different windows are different groups.
        max_looped_tokens: As of a `LoadedModel`; it multiplies nothing in loops.
    """

    def __init__(
        self,
        seed: int = 0,
        dtype: str = "float32",
        windows: tuple[int | None, ...] = (None,) * NUM_LAYERS,
        max_looped_tokens: int = 0,
    ) -> None:
        self.config = tiny_config(windows)
        self.dtype = dtype
        self._windows = windows
        self.max_looped_tokens = max_looped_tokens
        self.kernels = KernelSettings()
        self.packages = frozenset({"models"})
        self.platform = default_platform()
        layers = kv_cache_layers(self.config)
        self._places = groups_of_layers(layers, block_size=8, dtype="float32").places(layers)
        rng = np.random.default_rng(seed)
        shapes = [(VOCAB, HIDDEN), (MAX_POSITIONS, HIDDEN), (HIDDEN, VOCAB)]
        shapes += [(3, HIDDEN, NUM_HEADS * HEAD_DIM)] * NUM_LAYERS
        self.params = tuple(
            jax.device_put(rng.normal(size=s).astype(np.float32)).astype(dtype) for s in shapes
        )

    def with_places(self, places: Sequence[CachePlace]) -> "TinyModel":
        self._places = tuple(places)
        return self

    def with_kernels(self, kernels: KernelSettings) -> "TinyModel":
        self.kernels = kernels
        return self

    @property
    def param_specs(self) -> tuple[PartitionSpec, ...]:
        return (PartitionSpec(),) * len(self.params)

    def forward(self, params, kv_cache: KVCache, batch: ForwardBatch):
        num_rows, num_blocks, _, block_size, _ = kv_cache.k.shape
        hidden = params[0][batch.token_ids] + params[1][batch.positions]
        num_groups = batch.block_tables.shape[0]
        slots = pallas_kernels.slot_mapping(
            jnp.broadcast_to(batch.positions, (num_groups, *batch.positions.shape)),
            batch.block_tables,
            batch.query_start_loc,
            block_size=block_size,
            pad_slot=pallas_kernels.pad_slot(num_rows, num_blocks, block_size),
        )
        for layer_idx, place in enumerate(self._places):
            q, k, v = ((hidden @ w).reshape(-1, NUM_HEADS, HEAD_DIM) for w in params[3 + layer_idx])
            k_cache, v_cache = pallas_kernels.kv_scatter(
                kv_cache.k, kv_cache.v, k, v, slots[place.group_idx], place.row
            )
            kv_cache = KVCache(k=k_cache, v=v_cache)
            window = self._windows[layer_idx]
            attended = _attend(q, kv_cache, batch, place, window)
            hidden = hidden + attended.reshape(hidden.shape)
        if batch.drops_rows:
            hidden = hidden[batch.last_tokens]
        return batch.choose_outputs(hidden), kv_cache

    def compute_logits(self, params, hidden):
        return (hidden @ params[2]).astype(jnp.float32)

    def dense_logits(self, token_ids: list[int]) -> np.ndarray:  # f64[num_tokens, vocab]
        """The whole sequence at once, without a cache."""
        params = [np.asarray(jax.device_get(p), np.float64) for p in self.params]
        num_tokens = len(token_ids)
        hidden = params[0][token_ids] + params[1][:num_tokens]
        distance = np.arange(num_tokens)[:, None] - np.arange(num_tokens)[None]
        for w, window in zip(params[3:], self._windows, strict=True):
            q, k, v = (np.reshape(hidden @ x, (num_tokens, NUM_HEADS, HEAD_DIM)) for x in w)
            scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(HEAD_DIM)
            is_seen = (distance >= 0) & (distance < (window or num_tokens))
            scores = np.where(is_seen, scores, -np.inf)
            probs = np.exp(scores - scores.max(-1, keepdims=True))
            probs /= probs.sum(-1, keepdims=True)
            hidden = hidden + np.einsum("hqk,khd->qhd", probs, v).reshape(num_tokens, HIDDEN)
        return hidden @ params[2]


def _attend(q, kv_cache, batch, place, window) -> jax.Array:
    """Every token attends to its window up to its own position, through its block table.

    No token attends past the length that the batch states for its request.
    """
    block_tables, seq_lens = (x[place.group_idx] for x in (batch.block_tables, batch.seq_lens))
    num_reqs, num_blocks = block_tables.shape[0], kv_cache.k.shape[1]
    tokens = jnp.arange(q.shape[0])
    req = jnp.searchsorted(batch.query_start_loc[1:], tokens, side="right")
    req = jnp.minimum(req, num_reqs - 1)
    blocks = block_tables[req] + place.row * num_blocks

    def gathered(cache):  # -> f[num_tokens, num_heads, max_len, head_dim]
        pages = cache.reshape(-1, *cache.shape[2:])[blocks]
        return pages.swapaxes(1, 2).reshape(q.shape[0], NUM_HEADS, -1, HEAD_DIM)

    k, v = gathered(kv_cache.k), gathered(kv_cache.v)
    scores = jnp.einsum("thd,thsd->ths", q, k) / np.sqrt(HEAD_DIM)
    key_positions = jnp.arange(k.shape[2])[None, :]
    distance = batch.positions[:, None] - key_positions
    is_seen = (distance >= 0) & (distance < (window or k.shape[2]))
    is_seen &= key_positions < seq_lens[req][:, None]
    # A finite number, because padding sees nothing.
    probs = jax.nn.softmax(jnp.where(is_seen[:, None], scores, -1e30))
    return jnp.einsum("ths,thsd->thd", probs, jnp.where(is_seen[:, None, :, None], v, 0.0))
