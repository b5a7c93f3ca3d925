"""Rotary position embeddings, of the kinds that Hugging Face configs name."""

import math
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from models.config.rope_config import RopeConfig


def rotary_cos_sin(
    positions: jax.Array,  # i32[num_tokens]
    rope: RopeConfig,
    head_dim: int,
    *,
    factors: jax.Array | None = None,  # f32[head_dim // 2]
) -> tuple[jax.Array, jax.Array]:  # f32[num_tokens, head_dim // 2] each
    """Returns the cosine and sine by which each token's queries and keys are turned.

    A token's angles depend on its own position and on nothing else of the step. So a cached key is
    the same however the prompt was cut into chunks, and requests may share it. For "dynamic",
    whose base grows with the length beyond `original_max_position_embeddings`, that means: the
    token at position p is turned with the base of length p + 1.

    - Equal to Hugging Face: everything within the original length, and from there on generating
      token by token with a cache, where each key was turned when the sequence was p + 1 long.
    - Different from Hugging Face: a prompt longer than the original length. Processed there in one
      go, all its tokens are turned with the base of the whole prompt's length.

    Args:
        factors: Of the frequencies, for kinds other than "dynamic". None: there are none.
    """
    if head_dim == 0:  # of layers without positions
        no_angles = jnp.zeros((positions.shape[0], 0), jnp.float32)
        return no_angles, no_angles
    if rope.kind == "dynamic":
        angles = positions[:, None].astype(jnp.float32) * _dynamic_inv_freq(
            positions, rope, head_dim
        )
    else:
        inv_freq = inverse_frequencies(rope, head_dim)
        if factors is not None:
            inv_freq = inv_freq * factors
        angles = positions[:, None].astype(jnp.float32) * inv_freq
    scale = cos_sin_scale(rope)
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


class Rotate(Protocol):
    """Turns the first dimensions of each head; the other dimensions stay as they are."""

    def __call__(
        self,
        x: jax.Array,  # f[num_tokens, num_heads, head_dim]
        cos: jax.Array,  # f32[num_tokens, rotary_dim // 2]
        sin: jax.Array,  # f32[num_tokens, rotary_dim // 2]
    ) -> jax.Array:  # f[num_tokens, num_heads, head_dim]
        ...


def apply_rotary(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns dimensions i and i + rotary_dim // 2 as a pair, the layout of most checkpoints.

    See `Rotate` for the shapes.
    """
    return _turn_first(x, cos, sin, _turn_halves)


def apply_rotary_to_neighbors(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns dimensions 2 * i and 2 * i + 1 as a pair. See `Rotate` for the shapes."""
    return _turn_first(x, cos, sin, _turn_neighbors)


def apply_rotary_backwards(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns the pairs of `apply_rotary` in the other direction. See `Rotate` for the shapes."""
    return apply_rotary(x, cos, -sin)


def _turn_first(x: jax.Array, cos: jax.Array, sin: jax.Array, turn: Rotate) -> jax.Array:
    rotary_dim = 2 * cos.shape[-1]
    if rotary_dim == 0:
        return x
    turned = turn(x[..., :rotary_dim].astype(jnp.float32), cos[:, None, :], sin[:, None, :])
    turned = turned.astype(x.dtype)
    if rotary_dim == x.shape[-1]:
        return turned
    return jnp.concatenate([turned, x[..., rotary_dim:]], axis=-1)


def _turn_halves(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _turn_neighbors(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    first, second = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.reshape(x.shape)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:  # f32[head_dim // 2]
    """Returns the angle per position of each dimension pair; for "dynamic" within its length.

    Computed in float64 and rounded once, so within one float32 rounding of any other computation.
    """
    base_inv_freq = rope.theta ** -_exponents(head_dim)
    if rope.kind == "linear":
        inv_freq = base_inv_freq / rope.factor
    elif rope.kind == "llama3":
        inv_freq = _llama3_inv_freq(base_inv_freq, rope)
    elif rope.kind == "yarn":
        inv_freq = _yarn_inv_freq(base_inv_freq, rope, head_dim)
    elif rope.kind == "longrope":
        inv_freq = base_inv_freq / (rope.long_factors if rope.is_long else rope.short_factors)
    elif rope.kind == "proportional":
        inv_freq = _proportional_inv_freq(base_inv_freq, rope, head_dim)
    else:
        inv_freq = base_inv_freq
    return inv_freq.astype(np.float32)


def cos_sin_scale(rope: RopeConfig) -> float:
    """Returns the factor of cos and sin: 1 for all kinds except yarn and longrope."""
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
    return yarn_mscale(rope.factor, 1.0)


def _exponents(head_dim: int) -> np.ndarray:  # f64[head_dim // 2]
    # head_dim 8 -> [0, 1/4, 1/2, 3/4]
    return np.arange(0, head_dim, 2, dtype=np.float64) / head_dim


def _dynamic_inv_freq(
    positions: jax.Array,  # i32[num_tokens]
    rope: RopeConfig,
    head_dim: int,
) -> jax.Array:  # f32[num_tokens, head_dim // 2]
    """NTK scaling with a base that grows with the length, here that of the token's own position."""
    original = rope.original_max_position_embeddings
    length = jnp.maximum(positions + 1, original).astype(jnp.float32)
    # length == original gives a growth of exactly 1.
    growth = rope.factor * (length / original) - (rope.factor - 1)
    base = rope.theta * growth ** (head_dim / (head_dim - 2))
    return base[:, None] ** -_exponents(head_dim).astype(np.float32)


def _llama3_inv_freq(
    base_inv_freq: np.ndarray,  # f64[head_dim // 2]
    rope: RopeConfig,
) -> np.ndarray:  # f64[head_dim // 2]
    """Slows wavelengths beyond the original length, keeps short ones, and blends those between."""
    turns = rope.original_max_position_embeddings * base_inv_freq / (2 * math.pi)
    # Share of the unscaled frequency: 0 at low_freq_factor turns or fewer, 1 at high_freq_factor
    # or more. Where both are equal, as in Llama 4 Scout, there is nothing between them to blend.
    span = max(rope.high_freq_factor - rope.low_freq_factor, 1e-9)
    keep = np.clip((turns - rope.low_freq_factor) / span, 0.0, 1.0)
    return (1 - keep) * base_inv_freq / rope.factor + keep * base_inv_freq


def _proportional_inv_freq(
    base_inv_freq: np.ndarray,  # f64[head_dim // 2]
    rope: RopeConfig,
    head_dim: int,
) -> np.ndarray:  # f64[head_dim // 2]
    """Turns the fastest pairs alone, as fast as if all of the head were turned.

    With `AttentionConfig.rotary_dim` instead, pairs and frequencies would be as in a head of
    `rotary_dim` dimensions.
    """
    is_turned = np.arange(head_dim // 2) < int(rope.turned_share * head_dim // 2)
    return np.where(is_turned, base_inv_freq / rope.factor, 0.0)


def _yarn_inv_freq(
    base_inv_freq: np.ndarray,  # f64[head_dim // 2]
    rope: RopeConfig,
    head_dim: int,
) -> np.ndarray:  # f64[head_dim // 2]
    """Keeps fast dimensions, slows slow ones by the factor, and blends linearly between.

    Source: arXiv:2309.00071, section 3.2.
    """
    low = _yarn_dim_of_turns(rope.beta_fast, rope, head_dim)
    high = _yarn_dim_of_turns(rope.beta_slow, rope, head_dim)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # keeps the ramp's slope finite
    slow = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0.0, 1.0)
    return slow * base_inv_freq / rope.factor + (1 - slow) * base_inv_freq


def _yarn_dim_of_turns(num_turns: float, rope: RopeConfig, head_dim: int) -> float:
    """Returns the fractional dimension pair that turns so often over the original length."""
    length = rope.original_max_position_embeddings
    return head_dim * math.log(length / (num_turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def yarn_mscale(factor: float, mscale: float) -> float:
    """The growth of logits that YaRN compensates. Source: arXiv:2309.00071, section 3.4."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
