"""Draws one token per row: greedy, temperature, min_p, top_k, top_p, and log-probabilities.

The draw of a row depends on its logits, its settings, its seed and its position, never on other
rows. Filters have vLLM's order: temperature, min_p, top_k, then top_p of the tokens that top_k
kept. Each filter keeps the tokens whose probability reaches a threshold. The largest of the three
thresholds applies, so nothing is sorted.

Source: vllm/v1/sample/sampler.py and vllm/v1/sample/ops/topk_topp_sampler.py.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from paxkv.config.sampling_params import MAX_LOGPROBS
from paxkv.runner.memory.device_mesh import keep_split
from paxkv.runner.sampling.sampled_tokens import (
    RESULT_WIDTH,
    SampledTokens,
    pack_result,
    unpack_result,
)
from paxkv.runner.sampling.sampling_columns import SamplingInputs

# Vocabulary entries that are reduced together. Two levels of reductions are many times faster than
# one over the whole vocabulary on the CPU, and let a draw resolve probabilities below 2^-23.
GROUP_SIZE = 128
# Arguments to read at indices that are in bounds, without code for negative indices.
_IN_BOUNDS = {"mode": "promise_in_bounds", "wrap_negative_indices": False}


def sample(
    logits: jax.Array,  # f32[num_logits, vocab]
    inputs: SamplingInputs,
    *,
    raw_logits: Callable[[], jax.Array] | None = None,
    greedy_ids: jax.Array | None = None,
    mesh: Mesh | None = None,
) -> SampledTokens:
    """Draws a token per row. Filters and log-probabilities that no row needs cost nothing.

    Args:
        raw_logits: Returns the model's logits, f32[num_logits, vocab], if processors have changed
            `logits`. Log-probabilities are computed from these.
        greedy_ids: i32[num_logits], the most likely tokens, if known.
        mesh: The devices that the logits are split over, if there are several.
    """
    if greedy_ids is None:
        greedy_ids = argmax_grouped(logits, mesh)
    token_ids = jax.lax.cond(
        jnp.any(inputs.temperature > 0),
        lambda: jnp.where(inputs.temperature > 0, _draw(logits, inputs, mesh), greedy_ids),
        lambda: greedy_ids,
    )
    # Packed, because a branch with five results would need five more kernels.
    packed = jax.lax.cond(
        jnp.any(inputs.wants_logprobs),
        lambda: pack_result(
            with_logprobs(logits if raw_logits is None else raw_logits(), token_ids)
        ),
        lambda: jnp.pad(token_ids[:, None], ((0, 0), (0, RESULT_WIDTH - 1))),
    )
    return unpack_result(packed)


def argmax_grouped(
    logits: jax.Array,  # f32[num_logits, vocab]
    mesh: Mesh | None = None,
) -> jax.Array:  # i32[num_logits]
    """`jnp.argmax` over the last axis, ties to the lowest index, as a search in two levels."""
    grouped = _grouped(logits, -jnp.inf, mesh)
    group_idx = jnp.argmax(grouped.max(axis=-1), axis=-1)
    inner_idx = jnp.argmax(_take_group(grouped, group_idx), axis=-1)
    return (group_idx * GROUP_SIZE + inner_idx).astype(jnp.int32)


def _draw(
    logits: jax.Array, inputs: SamplingInputs, mesh: Mesh | None
) -> jax.Array:  # i32[num_logits]
    """Draws from each row's filtered distribution. The results of greedy rows are ignored."""
    temperature = jnp.where(inputs.temperature > 0, inputs.temperature, 1.0)[:, None]
    shifted = (logits - logits.max(axis=-1, keepdims=True)) / temperature
    # The most likely token has weight 1, so every weight is in [0, 1].
    # f32[num_logits, num_vocab_groups, GROUP_SIZE]
    weights = _grouped(jnp.exp(shifted), 0.0, mesh)
    threshold = _filter_threshold(weights, inputs)
    kept = jnp.where(weights >= threshold[:, None, None], weights, 0.0)
    # One uniform number picks the group, another the token in it. The product of both probabilities
    # is the probability of the token.
    uniforms = _uniforms(inputs.seed, inputs.draw_position)
    group_idx = _pick(kept.sum(axis=-1), uniforms[:, 0])
    inner_idx = _pick(_take_group(kept, group_idx), uniforms[:, 1])
    return (group_idx * GROUP_SIZE + inner_idx).astype(jnp.int32)


def _uniforms(
    seed: tuple[jax.Array, jax.Array],  # u32[num_logits] both
    position: jax.Array,  # i32[num_logits]
) -> jax.Array:  # f32[num_logits, 2] in [0, 1)
    """Two numbers per row that are a function of its seed and position alone.

    They are the words of `jax.random.fold_in(seed, position)` as a threefry key.
    """
    words = _threefry_2x32(seed, position.astype(jnp.uint32))
    return (words >> 8).astype(jnp.float32) * 2.0**-24  # 24 bits: the largest is below 1


def _threefry_2x32(
    key: tuple[jax.Array, jax.Array],  # u32[num_logits] both
    count: jax.Array,  # u32[num_logits], the low word of the hashed number; the high word is 0
) -> jax.Array:  # u32[num_logits, 2]
    """The hash of `jax.random`, as one kernel.

    On the CPU, JAX's own is a loop, which adds ten kernels to every program that draws.

    Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011), section 3.3.
    """
    keys = (*key, key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA))
    x0, x1 = keys[0], count + keys[1]
    for group in range(5):
        for distance in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x0 = x0 + x1
            x1 = x0 ^ ((x1 << distance) | (x1 >> (32 - distance)))
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return jnp.stack([x0, x1], axis=1)


def _pick(
    mass: jax.Array,  # f32[num_logits, n], not negative
    uniform: jax.Array,  # f32[num_logits], in [0, 1)
) -> jax.Array:  # i32[num_logits]
    """Returns index i with probability `mass[i] / sum(mass)`, and never an index without mass.

    Rounding in the parallel prefix sum can change the sum at an entry without mass. Such entries
    are therefore left out, also when the total is computed.
    """
    has_mass = mass > 0
    cdf = jnp.cumsum(mass, axis=-1)
    total = jnp.where(has_mass, cdf, 0.0).max(axis=-1)
    return jnp.argmax((cdf > (uniform * total)[:, None]) & has_mass, axis=-1)


def _filter_threshold(weights: jax.Array, inputs: SamplingInputs) -> jax.Array:
    """The least weight that each row keeps, f32[num_logits]: the largest threshold of its filters.

    The threshold of top_k is the top_k-th largest weight, so all weights equal to it are kept. With
    the threshold of top_p, the kept tokens have at least `top_p` of the mass that min_p and top_k
    keep. Both are the largest threshold for which a sum is large enough. They are two iterations of
    one loop, which skips an iteration that no row needs.
    """

    def raise_by(turn: jax.Array, threshold: jax.Array) -> jax.Array:
        is_top_k = turn == 0
        # A token counts 1 for top_k. Counts are exact in f32 up to 2^24.
        counted = jnp.where(is_top_k, 1.0, weights)

        def sum_at_least(threshold: jax.Array) -> jax.Array:
            return jnp.where(weights >= threshold[:, None, None], counted, 0.0).sum(axis=(1, 2))

        mass = inputs.top_p * sum_at_least(threshold)
        wanted = jnp.where(is_top_k, inputs.top_k.astype(jnp.float32), mass)
        # Rows without the filter need no search.
        is_wanted = jnp.where(is_top_k, inputs.top_k > 0, inputs.top_p < 1)
        found = _largest_threshold(sum_at_least, wanted, is_wanted)
        return jnp.where(is_wanted, jnp.maximum(threshold, found), threshold)

    first = jnp.where(jnp.any(inputs.top_k > 0), 0, 1)
    end = jnp.where(jnp.any(inputs.top_p < 1), 2, 1)
    return jax.lax.fori_loop(first, end, raise_by, inputs.min_p)


def _largest_threshold(
    measure: Callable[[jax.Array], jax.Array],
    wanted: jax.Array,  # f32[num_logits]
    is_wanted: jax.Array,  # bool[num_logits], rows that take part
) -> jax.Array:  # f32[num_logits]
    """The largest t in [0, 1] with `measure(t) >= wanted`, exactly, for a falling `measure`.

    A binary search over the bits of t: floats that are not negative sort as their bits do, so 30
    halvings reach a single one. A row that hits `wanted` exactly is done earlier.
    """

    def float_from_bits(bits: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(bits, jnp.float32)

    low = jnp.zeros(wanted.shape, jnp.int32)  # measure(low) >= wanted
    high = jnp.full(wanted.shape, 0x3F800001, jnp.int32)  # just above 1.0; measure(high) < wanted
    high = jnp.where(is_wanted, high, low + 1)

    def is_open(state: tuple[jax.Array, jax.Array]) -> jax.Array:
        low, high = state
        return jnp.any(high - low > 1)

    def halve(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = state
        middle = low + (high - low) // 2
        measured = measure(float_from_bits(middle))
        low = jnp.where(measured >= wanted, middle, low)
        high = jnp.where(measured > wanted, high, jnp.where(measured == wanted, low + 1, middle))
        return low, high

    low, _ = jax.lax.while_loop(is_open, halve, (low, high))
    return float_from_bits(low)


def with_logprobs(logits: jax.Array, token_ids: jax.Array) -> SampledTokens:
    """Log-probabilities of the model's own distribution, whatever the sampling settings."""
    logprobs_max = logits.max(axis=-1, keepdims=True)
    log_total = jnp.log(jnp.exp(logits - logprobs_max).sum(axis=-1, keepdims=True)) + logprobs_max
    row_idx = jnp.arange(logits.shape[0], dtype=jnp.int32)
    token_logits = logits.at[row_idx, token_ids].get(**_IN_BOUNDS)[:, None]
    num_top = min(MAX_LOGPROBS, logits.shape[-1])
    top_logits, top_token_ids = jax.lax.top_k(logits, num_top)
    pad = ((0, 0), (0, MAX_LOGPROBS - num_top))
    return SampledTokens(
        token_ids=token_ids,
        logprobs=(token_logits - log_total)[:, 0],
        ranks=(logits > token_logits).sum(axis=-1, dtype=jnp.int32) + 1,
        top_token_ids=jnp.pad(top_token_ids.astype(jnp.int32), pad),
        top_logprobs=jnp.pad(top_logits - log_total, pad),
    )


def _grouped(
    x: jax.Array,  # f[num_logits, vocab]
    fill: float,
    mesh: Mesh | None,
) -> jax.Array:  # f[num_logits, num_vocab_groups, GROUP_SIZE]
    """x in groups, padded with `fill`, so that each device of a mesh has equally many groups.

    If a group were split between two devices, each device would need all of x.
    """
    num_logits, vocab = x.shape
    num_vocab_groups = -(-vocab // GROUP_SIZE)
    if mesh is not None:
        num_vocab_groups += -num_vocab_groups % mesh.size
    padding = num_vocab_groups * GROUP_SIZE - vocab
    if padding:
        x = jnp.pad(x, ((0, 0), (0, padding)), constant_values=fill)
    return keep_split(x.reshape(num_logits, num_vocab_groups, GROUP_SIZE), mesh)


def _take_group(grouped: jax.Array, group_idx: jax.Array) -> jax.Array:
    """Returns one group of each row, f[num_logits, GROUP_SIZE]; group_idx is i32[num_logits]."""
    row_idx = jnp.arange(grouped.shape[0], dtype=jnp.int32)
    return grouped.at[row_idx, group_idx].get(**_IN_BOUNDS)
