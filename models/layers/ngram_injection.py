"""`NGramInjection`: adds embeddings of the last tokens to all residual streams."""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import pallas_kernels
from models.cache.format import Pages
from models.config.ngram_config import NUM_DIGITS, NGramConfig
from models.forward.carry import Carry
from models.forward.layer_context import LayerContext, LayerState
from models.layers.linear import Embedding, Linear
from models.layers.ngram_hash import hash_ngrams
from models.layers.residual_streams import StreamNorm, StreamsLayer
from models.layers.short_convolution import ShortConvolution
from models.weight_rule import Source, WeightRule

# The name of the layer's cache of states. Checkpoints also have it in the names of weights.
NGRAMS = "ple"


class NGramTable(Embedding):
    """An embedding that checkpoints store in several tensors."""

    def __init__(self, config: NGramConfig, *, dtype: jnp.dtype) -> None:
        super().__init__(config.num_rows, config.head_dim, dtype=dtype)
        self.num_parts = config.num_parts

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`."""
        num_rows, width = self.embedding.get_value().shape
        size = -(-num_rows // self.num_parts)
        sources = tuple(
            Source(
                name=f"{name}.shard_{idx}.weight",
                shape=(min(size, num_rows - idx * size), width),
            )
            for idx in range(-(-num_rows // size))
        )
        rule = WeightRule(
            sources=sources, layout="table", axes=("vocab", None), combine=np.concatenate
        )
        return {"embedding": rule}


class DilatedConvolution(ShortConvolution):
    """A `ShortConvolution` that reads every `step`-th input.

    The inputs between them have a weight of 0.
    """

    def __init__(self, num_channels: int, kernel_size: int, *, step: int, dtype: jnp.dtype) -> None:
        """Makes the layer with weights to be filled in.

        Args:
            kernel_size: The number of inputs that are read.
        """
        super().__init__(num_channels, (kernel_size - 1) * step + 1, dtype=dtype)
        self.step = step

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`."""
        rule = super().weight_rules(name)["kernel"]
        num_stored = (self.kernel_size - 1) // self.step + 1
        (source,) = rule.sources
        source = replace(source, shape=(self.num_channels, 1, num_stored))

        def combine(weights_np: Sequence[np.ndarray]) -> np.ndarray:
            (weight_np,) = weights_np
            wide_np = np.zeros((self.num_channels, 1, self.kernel_size), weight_np.dtype)
            wide_np[:, :, :: self.step] = weight_np
            return rule.combined([wide_np])

        return {"kernel": replace(rule, sources=(source,), combine=combine)}


class NGramEmbedding(nnx.Module):
    """The embeddings of the n-grams that end at each token."""

    def __init__(self, config: NGramConfig, *, dtype: jnp.dtype) -> None:
        """Makes the embeddings with weights to be filled in."""
        self.ngram_embedding = NGramTable(config, dtype=dtype)
        self.config = config

    def __call__(
        self,
        digits: jax.Array,  # f32[num_reqs, ngram_size - 1, NUM_DIGITS], see `NGramConfig.format`
        state: LayerState,
        context: LayerContext,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns f[num_tokens, embed_dim], and the digits after the step."""
        token_ids, digits = self._last_tokens(digits, state, context)
        rows = hash_ngrams(token_ids, self.config.multipliers, self.config.head_sizes)
        embedded = self.ngram_embedding(rows.reshape(-1))
        return embedded.reshape(rows.shape[0], -1), digits

    def _last_tokens(
        self, digits: jax.Array, state: LayerState, context: LayerContext
    ) -> tuple[jax.Array, jax.Array]:
        """Returns i32[num_tokens, ngram_size], the newest token first, and the new digits.

        A convolution moves the ids: channel i has the weight 1 for the token i + 1 places back, and
        0 for all others. Float32 holds ids of three digits exactly.
        """
        num_back, end = self.config.ngram_size - 1, self.config.end_token_id
        base = 256 ** np.arange(NUM_DIGITS)
        own = context.batch.token_ids
        # In the window, the last place is one token back.
        weight = np.eye(num_back + 1, dtype=np.float32)[:, num_back - 1 :: -1]
        window = (digits * base.astype(np.float32)).sum(axis=-1, keepdims=True)
        moved, window = pallas_kernels.causal_conv1d(
            jnp.repeat((own + 1).astype(jnp.float32)[:, None], num_back, axis=1),
            jnp.repeat(window, num_back, axis=2),
            jnp.asarray(weight),
            state.query_start_loc,
            state_ends=state.state_ends,
            target=context.kernels.target,
        )
        token_ids = [own]
        # True before the first token of the request, at the last end token, and before it.
        is_over = jnp.zeros(own.shape, bool)
        for earlier in moved.astype(jnp.int32).T - 1:
            is_over |= (earlier < 0) | (earlier == end)
            token_ids.append(jnp.where(is_over, end, earlier))
        stored = window[:, :, :1].astype(jnp.int32) // base.astype(np.int32) % 256
        return jnp.stack(token_ids, axis=1), stored.astype(jnp.float32)


class NGramInjection(nnx.Module):
    """Adds a gated projection of the embeddings, and a convolution of it, to each stream.

    Each stream has its own gate, computed from the stream and the embeddings.

    Source: huggingface.co/docs/transformers/model_doc/qwen4_exp.
    """

    def __init__(
        self, config: NGramConfig, hidden_size: int, *, eps: float, dtype: jnp.dtype
    ) -> None:
        """Makes the layer with weights to be filled in."""
        width = config.num_channels
        self.ple_embedding = NGramEmbedding(config, dtype=dtype)
        self.key_proj = Linear(config.embed_dim, width, dtype=dtype)
        self.value_proj = Linear(config.embed_dim, hidden_size, dtype=dtype)
        self.norm_key = StreamNorm(width, eps=eps, dtype=dtype)
        self.norm_query = StreamNorm(width, eps=eps, dtype=dtype)
        self.norm_conv = StreamNorm(width, eps=eps, dtype=dtype)
        self.conv1d = DilatedConvolution(
            width, config.kernel_size, step=config.ngram_size, dtype=dtype
        )

    def __call__(
        self,
        streams: jax.Array,  # f[num_tokens, num_streams, hidden]
        pages: Pages,
        context: LayerContext,
    ) -> tuple[jax.Array, Pages]:
        """Returns the streams with the values added, and the pages."""
        state = context.state(NGRAMS)
        window, digits = context.read_state(state, pages)
        embedded, digits = self.ple_embedding(digits, state, context)
        values, normed = context.by_token(self._gated_values, streams, embedded)
        # The state is whole on each device of a mesh.
        joined = context.kernels.split_last(normed.reshape(normed.shape[0], -1), None)
        convolved, window = self.conv1d(joined, window, state, context)
        pages = context.write_state(state, pages, (window, digits))
        convolved = convolved.astype(streams.dtype).reshape(streams.shape)
        return streams + (values + convolved), pages

    def _gated_values(
        self,
        streams: jax.Array,  # f[num_rows, num_streams, hidden]
        embedded: jax.Array,  # f[num_rows, embed_dim]
        context: LayerContext,
    ) -> tuple[jax.Array, jax.Array]:  # f[num_rows, num_streams, hidden], both
        keys = self.norm_key(self.key_proj(embedded, context).reshape(streams.shape))
        products = (keys * self.norm_query(streams)).astype(jnp.float32).sum(axis=-1)
        score = products * streams.shape[-1] ** -0.5
        # The square root of the score's magnitude, with the score's sign.
        root = jnp.sqrt(jnp.maximum(jnp.abs(score), 1e-6)) * jnp.sign(score)
        gate = jax.nn.sigmoid(root).astype(streams.dtype)[:, :, None]
        values = gate * self.value_proj(embedded, context)[:, None, :]
        return values, self.norm_conv(values)


class NGramStreamsLayer(StreamsLayer):
    """A `StreamsLayer` with an `NGramInjection` before it."""

    def __init__(self, *, ple: NGramInjection, **parts: nnx.Module) -> None:
        """Makes the layer; the other arguments are as in `StreamsLayer`."""
        super().__init__(**parts)
        self.ple = ple

    def __call__(self, carry: Carry, pages: Pages, context: LayerContext) -> tuple[Carry, Pages]:
        hidden, pages = self.ple(carry.hidden, pages, context)
        return super().__call__(replace(carry, hidden=hidden), pages, context)
