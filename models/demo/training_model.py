"""The Llama forward pass in flax, for training: packed rows, dense attention, no cache."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoModelConfig:
    """Sizes of the demo model; the fields are named as in Hugging Face's LlamaConfig."""

    vocab_size: int = 768
    hidden_size: int = 192
    intermediate_size: int = 384
    num_hidden_layers: int = 4
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 32
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 1024
    initializer_range: float = 0.02


def rotate(
    x: jax.Array,  # f[num_rows, row_length, num_heads, head_dim]
    positions: jax.Array,  # i32[num_rows, row_length]
    theta: float,
) -> jax.Array:  # f[num_rows, row_length, num_heads, head_dim]
    """Rotary embedding, Llama's half-split layout: element i turns with i + head_dim/2."""
    half = x.shape[-1] // 2
    inv_freq = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[..., None, None].astype(jnp.float32) * inv_freq
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    x1, x2 = x[..., :half], x[..., half:]
    return jnp.concatenate((x1 * cos - x2 * sin, x2 * cos + x1 * sin), axis=-1)


class Attention(nnx.Module):
    """Grouped-query attention inside one packed row."""

    def __init__(self, config: DemoModelConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        init = nnx.initializers.normal(config.initializer_range)
        out_init = nnx.initializers.normal(
            config.initializer_range / (2 * config.num_hidden_layers) ** 0.5
        )
        hidden = config.hidden_size
        self.q_proj = nnx.Linear(hidden, q_size, use_bias=False, kernel_init=init, rngs=rngs)
        self.k_proj = nnx.Linear(hidden, kv_size, use_bias=False, kernel_init=init, rngs=rngs)
        self.v_proj = nnx.Linear(hidden, kv_size, use_bias=False, kernel_init=init, rngs=rngs)
        self.o_proj = nnx.Linear(q_size, hidden, use_bias=False, kernel_init=out_init, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,  # f32[num_rows, row_length, hidden]
        positions: jax.Array,  # i32[num_rows, row_length]
        mask: jax.Array,  # bool[num_rows, row_length, row_length], query by key
    ) -> jax.Array:  # f32[num_rows, row_length, hidden]
        c = self.config
        rows, length, _ = x.shape
        group = c.num_attention_heads // c.num_key_value_heads
        q = self.q_proj(x).reshape(rows, length, c.num_attention_heads, c.head_dim)
        k = self.k_proj(x).reshape(rows, length, c.num_key_value_heads, c.head_dim)
        v = self.v_proj(x).reshape(rows, length, c.num_key_value_heads, c.head_dim)
        q = rotate(q, positions, c.rope_theta) * c.head_dim**-0.5
        k = rotate(k, positions, c.rope_theta)
        q = q.reshape(rows, length, c.num_key_value_heads, group, c.head_dim)
        scores = jnp.einsum("rqkgd,rtkd->rkgqt", q, k)
        weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, -1e30), axis=-1)
        out = jnp.einsum("rkgqt,rtkd->rqkgd", weights, v)
        return self.o_proj(out.reshape(rows, length, -1))


class MLP(nnx.Module):
    """SwiGLU."""

    def __init__(self, config: DemoModelConfig, *, rngs: nnx.Rngs) -> None:
        hidden, wide = config.hidden_size, config.intermediate_size
        init = nnx.initializers.normal(config.initializer_range)
        out_init = nnx.initializers.normal(
            config.initializer_range / (2 * config.num_hidden_layers) ** 0.5
        )
        self.gate_proj = nnx.Linear(hidden, wide, use_bias=False, kernel_init=init, rngs=rngs)
        self.up_proj = nnx.Linear(hidden, wide, use_bias=False, kernel_init=init, rngs=rngs)
        self.down_proj = nnx.Linear(wide, hidden, use_bias=False, kernel_init=out_init, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nnx.Module):
    """Pre-norm attention and MLP, both residual."""

    def __init__(self, config: DemoModelConfig, *, rngs: nnx.Rngs) -> None:
        eps = config.rms_norm_eps
        self.input_layernorm = nnx.RMSNorm(config.hidden_size, epsilon=eps, rngs=rngs)
        self.self_attn = Attention(config, rngs=rngs)
        self.post_attention_layernorm = nnx.RMSNorm(config.hidden_size, epsilon=eps, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x: jax.Array, positions: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.self_attn(self.input_layernorm(x), positions, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class DemoModel(nnx.Module):
    """LlamaForCausalLM with tied embeddings; attributes are named as in the checkpoint."""

    def __init__(self, config: DemoModelConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embed_tokens = nnx.Embed(
            config.vocab_size,
            config.hidden_size,
            embedding_init=nnx.initializers.normal(config.initializer_range),
            rngs=rngs,
        )
        self.layers = nnx.List(
            [DecoderLayer(config, rngs=rngs) for _ in range(config.num_hidden_layers)]
        )
        self.norm = nnx.RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, rngs=rngs)

    def __call__(
        self,
        token_ids: jax.Array,  # i32[num_rows, row_length]
        positions: jax.Array,  # i32[num_rows, row_length]
        segment_ids: jax.Array,  # i32[num_rows, row_length], conversation of each token
    ) -> jax.Array:  # f32[num_rows, row_length, vocab]
        """Logits of every token, each attending to earlier tokens of its own conversation."""
        return self.logits(self.hidden_states(token_ids, positions, segment_ids)[-1])

    def hidden_states(
        self,
        token_ids: jax.Array,  # i32[num_rows, row_length]
        positions: jax.Array,  # i32[num_rows, row_length]
        segment_ids: jax.Array,  # i32[num_rows, row_length]
    ) -> list[jax.Array]:  # f32[num_rows, row_length, hidden], one for each layer
        """Returns the output of each layer."""
        mask = attention_mask(segment_ids)
        x, found = self.embed_tokens(token_ids), []
        for layer in self.layers:
            x = layer(x, positions, mask)
            found.append(x)
        return found

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Returns logits from the output of the last layer."""
        return self.embed_tokens.attend(self.norm(hidden))


def attention_mask(
    segment_ids: jax.Array,  # i32[num_rows, row_length]
) -> jax.Array:  # bool[num_rows, row_length, row_length], query by key
    """Each token sees the tokens of its conversation up to itself."""
    length = segment_ids.shape[1]
    causal = jnp.tril(jnp.ones((length, length), bool))
    return causal & (segment_ids[:, :, None] == segment_ids[:, None, :])
