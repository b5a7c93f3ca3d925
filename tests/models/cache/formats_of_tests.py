"""Formats and layers that exist only here: what a new kind of KV memory needs, in a few lines."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import pallas_kernels
from models.cache import rules
from models.cache.attention_format import AttentionFormat
from models.cache.state_format import StateFormat
from models.config.attention_config import SELF_ATTENTION, AttentionConfig
from models.config.rope_config import RopeConfig
from models.decoder_spec import CacheRef, DecoderSpec, LayerSpec
from models.decoders.layer_loop import PlacedLayer
from models.forward.carry import Carry
from models.forward.forward_batch import ForwardBatch
from models.forward.kernel_settings import KernelSettings
from models.forward.layer_context import LayerCache, make_context
from models.forward.wants import Wants
from models.layers.attention import Attention
from pallas_kernels.page_views import unview_pages, view_pages
from paxkv.runner.memory.kv_cache_arrays import empty_kv_cache
from paxkv.runner.memory.kv_cache_groups import KVCacheGroups, groups_of_spec
from paxkv.runner.programs.make_batch import make_batch

HIDDEN = 8
DECAY = 0.5
ROPE = RopeConfig()


def sum_format(num_copies: int) -> StateFormat:
    """The sum of a request's tokens, and copies of it."""
    return StateFormat(shapes=((HIDDEN,), (num_copies, HIDDEN)))


@dataclasses.dataclass(frozen=True)
class IndexFormat:
    """One vector per token, of `dtype`; pages are filled by wider vectors."""

    width: int
    dtype: str
    kind: str = "index"

    def on_each_of(self, num_devices):
        return self

    def page_bytes(self, block_size):
        return self.width * block_size * jnp.dtype(self.dtype).itemsize

    def content_bytes(self, block_size):
        return self.page_bytes(block_size)

    def with_width_step(self, step):
        return self

    def self_tests(self, attention, block_size):
        return ()

    def with_page_bytes(self, page_bytes, block_size):
        width = page_bytes // (block_size * jnp.dtype(self.dtype).itemsize)
        wide = dataclasses.replace(self, width=width)
        return wide if wide.page_bytes(block_size) == page_bytes else None

    def write(self, pages, cache: LayerCache, vectors):
        view = view_pages(
            pages, num_parts=1, num_kv_heads=1, block_size=cache.block_size, head_dim=self.width
        )
        wide = jnp.pad(vectors, ((0, 0), (0, self.width - vectors.shape[1])))[:, None]
        dtype = jnp.dtype(self.dtype)
        kv_dtype = None if dtype == pages.dtype else dtype
        view = pallas_kernels.kv_scatter(
            view, wide, None, cache.slots, cache.row, kv_dtype=kv_dtype
        )
        return unview_pages(view, pages.shape)

    def read(self, pages, cache: LayerCache) -> jax.Array:  # f[num_reqs, max_len, width]
        num_reqs = cache.block_tables.shape[0]
        words = pages.shape[2]
        read = rules.read_prefix(pages, cache.row, cache.block_tables.reshape(-1), words)
        return rules.recast(read, self.dtype).reshape(num_reqs, -1, self.width)


def _requests_of_tokens(batch: ForwardBatch) -> jax.Array:  # i32[num_tokens]
    token = jnp.arange(batch.token_ids.shape[0])
    req = jnp.searchsorted(batch.query_start_loc[1:], token, side="right")
    return jnp.minimum(req, batch.num_reqs - 1)


def make_attention(seed: int, *, num_kv_heads: int, head_dim: int) -> Attention:
    config = AttentionConfig(
        hidden_size=HIDDEN,
        num_q_heads=2,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=ROPE,
        scale=head_dim**-0.5,
    )
    attention = Attention(config, dtype=jnp.float32)
    rng = np.random.default_rng(seed)
    for linear in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
        shape = linear.kernel.get_value().shape
        linear.kernel.set_value(jax.device_put((rng.normal(size=shape) * 0.3).astype(np.float32)))
    return attention


class AttentionLayer(nnx.Module):
    """Attention alone."""

    def __init__(self, seed: int, *, num_kv_heads: int = 2, head_dim: int = 8) -> None:
        self.self_attn = make_attention(seed, num_kv_heads=num_kv_heads, head_dim=head_dim)

    def __call__(self, carry, pages, context):
        attended, pages = self.self_attn(carry.hidden, pages, context, norm=lambda x: x)
        hidden = context.kept(carry.hidden) + self.self_attn.project_out(
            attended, context.of_kept()
        )
        return Carry(hidden=hidden), pages


class AttentionAndSumLayer(AttentionLayer):
    """Attention and a state side by side: both see the layer's input, and both are added.

    The state is half the sum, and half its last copy.
    """

    def __init__(self, seed: int, *, num_copies: int = 1) -> None:
        super().__init__(seed)
        self.num_copies = num_copies

    def __call__(self, carry, pages, context):
        hidden, batch = carry.hidden, context.batch
        attended, pages = self.self_attn(hidden, pages, context, norm=lambda x: x)
        state = context.state("sum")
        sums, copies = state.format.read(pages, state)
        sums = (sums + copies[:, -1]) / 2
        # The state must be written after attention has read the pages.
        sums = rules.after(sums, attended)
        req = _requests_of_tokens(batch)
        is_real = jnp.arange(hidden.shape[0]) < batch.query_start_loc[-1]
        running = jnp.cumsum(jnp.where(is_real[:, None], hidden, 0.0), axis=0)
        starts = batch.query_start_loc[:-1]
        before = jnp.where(starts[:, None] > 0, running[jnp.maximum(starts - 1, 0)], 0.0)
        of_token = sums[req] + running - before[req]
        last = of_token[jnp.maximum(batch.query_start_loc[1:] - 1, 0)]
        copies = jnp.repeat(last[:, None], self.num_copies, axis=1)
        pages = state.format.write(pages, state, (last, copies))
        return Carry(
            hidden=hidden
            + self.self_attn.project_out(attended, context.of_kept())
            + DECAY * of_token
        ), pages


class AttentionAndIndexLayer(AttentionLayer):
    """A main cache and an index cache: adds the mean of all index vectors so far."""

    def __call__(self, carry, pages, context):
        hidden, batch, cache = carry.hidden, context.batch, context.cache("index")
        vectors = hidden[:, : HIDDEN // 2]
        pages = cache.format.write(pages, cache, vectors)
        req = _requests_of_tokens(batch)
        stored = cache.format.read(pages, cache)[req, :, : vectors.shape[1]].astype(jnp.float32)
        is_seen = jnp.arange(stored.shape[1]) <= batch.positions[:, None]
        mean = jnp.where(is_seen[..., None], stored, 0.0).sum(axis=1) / is_seen.sum(
            axis=1, keepdims=True
        )
        hidden = rules.after(hidden, mean) + jnp.concatenate([mean, mean], axis=1)
        attended, pages = self.self_attn(hidden, pages, context, norm=lambda x: x)
        return Carry(hidden=hidden + self.self_attn.project_out(attended, context.of_kept())), pages


def spec_of(layers, *, kv_dtype: str) -> DecoderSpec:
    specs = []
    for layer_idx, layer in enumerate(layers):
        config = layer.self_attn.config
        attention = AttentionFormat(
            num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, dtype=kv_dtype
        )
        caches = [(SELF_ATTENTION, CacheRef(format=attention))]
        if isinstance(layer, AttentionAndSumLayer):
            caches.append(("sum", CacheRef(format=sum_format(layer.num_copies))))
        if isinstance(layer, AttentionAndIndexLayer):
            index = IndexFormat(width=HIDDEN // 2, dtype=kv_dtype)
            caches.append(("index", CacheRef(format=index)))
        specs.append(LayerSpec(name=f"layers.{layer_idx}", caches=tuple(caches)))
    return DecoderSpec(layers=tuple(specs))


class Stack:
    """Layers over one pool of pages, and requests with shuffled blocks.

    Args:
        run: `run_in_turn` or `run_in_loop`.
    """

    def __init__(self, layers, platform, run, *, kv_dtype="float32", block_size=4, max_len=32):
        self.layers = layers
        self.platform, self.kv_dtype, self._run = platform, kv_dtype, run
        spec = spec_of(layers, kv_dtype=kv_dtype)
        self.groups: KVCacheGroups = groups_of_spec(spec, block_size=block_size)
        self.places = self.groups.places(spec)
        self.table_shapes = self.groups.tables(max_len)

    def block_tables(self, num_reqs: int, num_blocks: int) -> list[np.ndarray]:
        """Blocks of the pool, each of one request and group."""
        counts = [t.num_groups * num_reqs * t.max_blocks_per_req for t in self.table_shapes]
        ids = 1 + np.random.default_rng(0).permutation(num_blocks - 1)[: sum(counts)]
        parts = np.split(ids.astype(np.int32), np.cumsum(counts)[:-1])
        return [
            np.broadcast_to(
                part.reshape(t.num_groups, num_reqs, t.max_blocks_per_req), t.dims(num_reqs)
            )
            for part, t in zip(parts, self.table_shapes, strict=True)
        ]

    def pages(self, num_blocks: int) -> jax.Array:
        return empty_kv_cache(self.groups.config(num_blocks), self.platform, self.kv_dtype)

    def step(self, pages, hidden, positions, query_start_loc, seq_lens, block_tables):
        """Hidden states of all tokens after the last layer, and the pages."""
        batch = make_batch(
            token_ids=jnp.zeros(positions.shape, jnp.int32),
            positions=positions,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_tables=block_tables,
            table_shapes=self.table_shapes,
            logits_indices=jnp.arange(positions.shape[0]),
            wants=Wants(hidden="all"),
        )
        rotaries = {layer.self_attn.config.rotary for layer in self.layers}
        context = make_context(batch, pages, KernelSettings(), rotaries)
        placed = list(map(PlacedLayer, self.layers, range(len(self.layers)), self.places))
        carry, pages = self._run(placed, Carry(hidden=hidden), pages, context)
        return carry.hidden, pages
