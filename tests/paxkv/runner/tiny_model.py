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
    DecoderSpec,
    ForwardBatch,
    KernelSettings,
    LayerPlaces,
    Pages,
    RopeConfig,
)
from models.decoder_spec import spec_of_attention
from models.forward.layer_context import make_context
from models.platforms import default_platform
from paxkv.runner.memory.kv_cache_groups import groups_of_spec

VOCAB, HIDDEN, NUM_LAYERS, NUM_HEADS, HEAD_DIM = 50, 8, 2, 2, 4
MAX_POSITIONS = 256


@dataclasses.dataclass(frozen=True)
class TinyConfig:
    """The fields of a model's configuration that the runner reads."""

    attention: tuple[AttentionConfig, ...]
    vocab_size: int = VOCAB
    has_unified_kv: bool = False

    def spec(self, kv_dtype: str) -> DecoderSpec:
        return spec_of_attention(self.attention, kv_dtype=kv_dtype)


def tiny_config(windows: tuple[int | None, ...], num_kv_heads: tuple[int, ...]) -> TinyConfig:
    """Layers with these windows and numbers of KV heads."""
    layer = AttentionConfig(
        hidden_size=HIDDEN,
        num_q_heads=NUM_HEADS,
        num_kv_heads=NUM_HEADS,
        head_dim=HEAD_DIM,
        rope=RopeConfig(),  # which it does without
        scale=HEAD_DIM**-0.5,
    )
    return TinyConfig(
        tuple(
            dataclasses.replace(layer, sliding_window=window, num_kv_heads=heads)
            for window, heads in zip(windows, num_kv_heads, strict=True)
        )
    )


class TinyModel:
    """Embeddings and attention layers without norms or MLPs; reads and writes the paged cache.

    Args:
        windows: Sliding window of each layer; layers of different windows are different groups.
        num_kv_heads: Of each layer; None is `NUM_HEADS` in all. Layers of fewer have longer blocks.
    """

    def __init__(
        self,
        seed: int = 0,
        dtype: str = "float32",
        windows: tuple[int | None, ...] = (None,) * NUM_LAYERS,
        num_kv_heads: tuple[int, ...] | None = None,
    ) -> None:
        self.num_kv_heads = num_kv_heads or (NUM_HEADS,) * len(windows)
        self.config = tiny_config(windows, self.num_kv_heads)
        self.dtype = dtype
        self.windows = windows
        self.kernels = KernelSettings()
        self.packages = frozenset({"models"})
        self.class_name = "tests.TinyModel"
        self.unused_token_ids = ()
        self.platform = default_platform()
        spec = self.config.spec("float32")
        self.places = groups_of_spec(spec, block_size=8).places(spec)
        rng = np.random.default_rng(seed)
        shapes = [(VOCAB, HIDDEN), (MAX_POSITIONS, HIDDEN), (HIDDEN, VOCAB)]
        # Q, K and V; of the heads of K and V, a layer takes the first.
        shapes += [(3, HIDDEN, NUM_HEADS * HEAD_DIM)] * len(windows)
        self.param_names = tuple(str(idx) for idx in range(len(shapes)))
        self.weight_rules = self.parameters = self.stack_places = {}
        self.product_dtypes = frozenset({dtype})
        self.params = tuple(
            jax.device_put(rng.normal(size=s).astype(np.float32)).astype(dtype) for s in shapes
        )

    @property
    def device_bytes(self) -> int:
        return sum(param.nbytes for param in self.params)

    def with_places(self, places: Sequence[LayerPlaces]) -> "TinyModel":
        self.places = tuple(places)
        return self

    def with_kernels(self, kernels: KernelSettings) -> "TinyModel":
        self.kernels = kernels
        return self

    @property
    def param_specs(self) -> tuple[PartitionSpec, ...]:
        return (PartitionSpec(),) * len(self.params)

    def forward(self, params, pages: Pages, batch: ForwardBatch, change_context=None):
        context = make_context(batch, pages, self.kernels, rotaries=())
        slots = context.slots
        if change_context is not None:
            context = change_context(context)
        hidden = params[0][context.batch.token_ids] + params[1][batch.positions]
        for layer_idx, ((_, place),) in enumerate(self.places):
            q, k, v = ((hidden @ w).reshape(-1, NUM_HEADS, HEAD_DIM) for w in params[3 + layer_idx])
            k, v = (x[:, : self.num_kv_heads[layer_idx]] for x in (k, v))
            inputs = batch.groups[place.inputs_idx]
            view = place.format.view(pages, inputs.block_size)
            kv_dtype = place.format.kv_dtype(pages)
            own_slots = slots[place.inputs_idx][place.group_idx]
            view = pallas_kernels.kv_scatter(view, k, v, own_slots, place.row, kv_dtype=kv_dtype)
            pages = place.format.unview(view, pages)
            if kv_dtype is not None:
                view = jax.lax.bitcast_convert_type(view, kv_dtype)
            tables = inputs.block_tables[place.group_idx]
            window = self.windows[layer_idx]
            attended = _attend(q, view, place.row, tables, inputs.seq_lens, batch, window)
            hidden = hidden + attended.reshape(hidden.shape)
        if batch.drops_rows:
            hidden = hidden[batch.last_tokens]
        return batch.choose_outputs(hidden), pages

    def compute_logits(self, params, hidden):
        return (hidden @ params[2]).astype(jnp.float32)

    def dense_logits(self, token_ids: list[int]) -> np.ndarray:  # f64[num_tokens, vocab]
        """The whole sequence at once, without a cache."""
        params = [np.asarray(jax.device_get(p), np.float64) for p in self.params]
        num_tokens = len(token_ids)
        hidden = params[0][token_ids] + params[1][:num_tokens]
        distance = np.arange(num_tokens)[:, None] - np.arange(num_tokens)[None]
        layers = zip(params[3:], self.windows, self.num_kv_heads, strict=True)
        for w, window, num_kv_heads in layers:
            q, k, v = (np.reshape(hidden @ x, (num_tokens, NUM_HEADS, HEAD_DIM)) for x in w)
            group_size = NUM_HEADS // num_kv_heads
            k, v = (np.repeat(x[:, :num_kv_heads], group_size, axis=1) for x in (k, v))
            scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(HEAD_DIM)
            is_seen = (distance >= 0) & (distance < (window or num_tokens))
            scores = np.where(is_seen, scores, -np.inf)
            probs = np.exp(scores - scores.max(-1, keepdims=True))
            probs /= probs.sum(-1, keepdims=True)
            hidden = hidden + np.einsum("hqk,khd->qhd", probs, v).reshape(num_tokens, HIDDEN)
        return hidden @ params[2]


def _attend(q, view, row, block_tables, seq_lens, batch, window) -> jax.Array:
    """Every token attends to its window up to its own position, through its block table.

    No token attends past the length that the batch states for its request.
    """
    num_reqs = block_tables.shape[0]
    tokens = jnp.arange(q.shape[0])
    req = jnp.searchsorted(batch.query_start_loc[1:], tokens, side="right")
    req = jnp.minimum(req, num_reqs - 1)

    def gathered(part):  # -> f[num_tokens, num_heads, max_len, head_dim]
        blocks = view[row, 2 * block_tables[req] + part]
        num_kv_heads = blocks.shape[2]
        heads = blocks.swapaxes(1, 2).reshape(q.shape[0], num_kv_heads, -1, HEAD_DIM)
        return jnp.repeat(heads, NUM_HEADS // num_kv_heads, axis=1)

    k, v = gathered(0), gathered(1)
    scores = jnp.einsum("thd,thsd->ths", q, k) / np.sqrt(HEAD_DIM)
    key_positions = jnp.arange(k.shape[2])[None, :]
    distance = batch.positions[:, None] - key_positions
    is_seen = (distance >= 0) & (distance < (window or k.shape[2]))
    is_seen &= key_positions < seq_lens[req][:, None]
    # A finite number, because padding sees nothing.
    probs = jax.nn.softmax(jnp.where(is_seen[:, None], scores, -1e30))
    return jnp.einsum("ths,thsd->thd", probs, jnp.where(is_seen[:, None, :, None], v, 0.0))
