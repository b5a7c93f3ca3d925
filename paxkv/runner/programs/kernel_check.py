"""Before anything is served: do this device's own kernels give what plain XLA gives?

Most checks of a kernel run without the device it is written for, and cannot see what only the
device does. So the engine asks once, at the start, with small random inputs in the model's own
shapes, and falls back to plain XLA with an error in the log if the answer is no.
"""

import dataclasses
import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from models import AttentionConfig, AttentionFormat
from pallas_kernels.dispatch import collect_misfits, target_misfit
from paxkv.runner.programs.expert_check import CheckedProduct, multiply_and_compare

logger = logging.getLogger(__name__)

# (query tokens, tokens in the cache): two decodes, a prompt, an empty row, and a chunk. With
# sequences of more than 512 tokens, the GPU's kernel for decodes splits its work.
REQUESTS = ((1, 1), (1, 700), (40, 40), (0, 0), (70, 600))
NUM_PADDING_TOKENS = 3
# Small inputs would not feel a window or chunks of 4,096 tokens, or a soft cap of 50: larger ones
# are tried as these, which a kernel that forgets them does not pass.
MAX_WINDOW = 60
MAX_SOFT_CAP = 1.0
# What sinks are drawn around: as heavy as 50 keys.
MEAN_SINK = 4.0
# Two roundings of a 16-bit result are apart by less; a wrong mask or a lost tile by far more.
MAX_RELATIVE_ERROR = 2e-2


@dataclasses.dataclass(frozen=True, slots=True)
class CheckedLayer:
    """Attention as a layer computes it, and its keys and values as they are stored."""

    attention: AttentionConfig
    format: AttentionFormat
    block_size: int


class KernelChoice(NamedTuple):
    """What computes the operations on the KV cache.

    Args:
        implementation: The `implementation` that the model passes to every op: "xla", or None if
            each op chooses for itself.
        why_no_kernels: Why all ops run as plain XLA, a sentence; None if they do not.
        ops_without_kernels: Why some ops run as plain XLA nevertheless, a sentence each.
    """

    implementation: str | None
    why_no_kernels: str | None = None
    ops_without_kernels: tuple[str, ...] = ()


def choose_implementation(
    kernels: str,
    layers: Sequence[CheckedLayer],
    products: Iterable[CheckedProduct],
    device: jax.Device,
) -> KernelChoice:
    """Chooses between plain XLA and the kernels for a device.

    Args:
        kernels: `RunnerConfig.kernels`.
        layers: Of the model; those without keys and values left out.
        products: Of its layers with experts.
    """
    target = pallas_kernels.target_of(device)
    if kernels == "xla":
        return KernelChoice("xla", "--kernels xla is set.")
    misfit = target_misfit(target)
    if misfit is not None:
        return KernelChoice(None, f"{misfit}.")  # dispatch chooses XLA by itself
    with collect_misfits() as misfits:
        reason = why_kernels_differ(layers, target) or why_products_differ(products, target)
    if reason is None:
        return KernelChoice(None, None, tuple(misfits))
    logger.error(
        "the kernels for %s are not used, plain XLA is: %s. Please report this, with the model, "
        "the versions of jax and of the driver, and this line.",
        target.device_kind,
        reason,
    )
    return KernelChoice("xla", f"the kernels failed the check at the start: {reason}.")


def why_kernels_differ(
    layers: Sequence[CheckedLayer],
    target: pallas_kernels.Target,
    *,
    implementation: str | None = None,
) -> str | None:
    """Runs one layer of each kind, and a block copy, with `implementation` and with XLA.

    Returns:
        What differs; None if nothing does.
    """
    # Rotary embeddings are not the kernels' work: layers that differ in them alone are tried once.
    kinds = {(_rules(layer.attention), _shapes(layer)): layer for layer in layers}
    for (static_rules, _), layer in kinds.items():
        rules = dict(static_rules)
        inputs = _random_layer(layer, seed=rules["sliding_window"] or 0)
        expected = _run_layer(inputs, rules, {"implementation": "xla", "target": target})
        chosen = {"implementation": implementation, "target": target}
        try:
            got = _run_layer(inputs, rules, chosen)
        # Whatever goes wrong in a compiler or on the device, plain XLA can still serve.
        except Exception as error:
            logger.exception("a kernel failed")
            return f"running them raised {type(error).__name__}"
        for part, name in enumerate(("K", "V")):
            if not np.array_equal(got[1][:, part::2], expected[1][:, part::2]):
                return f"{name} was not written where XLA writes it"
        difference = relative_error(got[0], expected[0])
        if not difference <= MAX_RELATIVE_ERROR:  # NaN is not
            sinks = ", sinks" if layer.attention.has_sinks else ""
            return (
                f"attention with {rules}{sinks} differs from XLA's by {difference:.3g} of its "
                f"norm, more than {MAX_RELATIVE_ERROR}"
            )
    return None


def why_products_differ(
    products: Iterable[CheckedProduct],
    target: pallas_kernels.Target,
    *,
    implementation: str | None = None,
) -> str | None:
    """Runs products of experts with `implementation` and with XLA.

    Returns:
        What differs; None if nothing does.
    """
    try:
        for what, got_np, expected_np in multiply_and_compare(
            products, target, implementation=implementation
        ):
            difference = relative_error(got_np, expected_np)
            if not difference <= MAX_RELATIVE_ERROR:  # NaN is not
                return (
                    f"the product of {what} differs from XLA's by {difference:.3g} of its norm, "
                    f"more than {MAX_RELATIVE_ERROR}"
                )
    # As in `why_kernels_differ`: plain XLA can still serve.
    except Exception as error:
        logger.exception("a kernel failed")
        return f"running the product of experts raised {type(error).__name__}"
    return None


def _rules(layer: AttentionConfig) -> tuple[tuple[str, float | None], ...]:
    """Static arguments of `paged_attention`, with limits that small inputs feel."""
    return (
        ("scale", layer.scale),
        ("sliding_window", _at_most(layer.sliding_window, MAX_WINDOW)),
        ("chunk_size", _at_most(layer.chunk_size, MAX_WINDOW)),
        ("soft_cap", _at_most(layer.soft_cap, MAX_SOFT_CAP)),
    )


def _at_most(limit: float | None, largest: float) -> float | None:
    return None if limit is None else min(limit, largest)


def _shapes(layer: CheckedLayer) -> tuple[int, ...]:
    """What the shapes of a call's arrays follow from."""
    attention, cache = layer.attention, layer.format
    return (
        *(attention.num_q_heads, attention.has_sinks),
        *(cache.num_kv_heads, cache.head_dim, layer.block_size),
    )


def relative_error(
    got_np: np.ndarray,
    expected_np: np.ndarray,
) -> float:
    """`|got - expected| / |expected|`, norms over all entries."""
    norm = float(np.linalg.norm(expected_np))
    return float(np.linalg.norm(got_np - expected_np)) / (norm or 1.0)


def _random_layer(layer: CheckedLayer, *, seed: int) -> dict[str, jax.Array | None]:
    """A cache of one row full of random numbers, and a ragged batch over it."""
    rng = np.random.default_rng(seed)
    cache, block_size = layer.format, layer.block_size
    num_q_heads, head_dim, dtype = (
        layer.attention.num_q_heads,
        cache.head_dim,
        jnp.dtype(cache.dtype),
    )
    num_query = np.array([num_query for num_query, _ in REQUESTS])
    seq_lens = np.array([seq_len for _, seq_len in REQUESTS], np.int32)
    max_blocks_per_req = -(-int(seq_lens.max()) // block_size)
    num_blocks = 1 + len(REQUESTS) * max_blocks_per_req
    tables = 1 + rng.permutation(num_blocks - 1).reshape(len(REQUESTS), -1).astype(np.int32)
    cache_shape = (1, 2 * num_blocks, cache.num_kv_heads, block_size, head_dim)
    num_tokens = int(num_query.sum()) + NUM_PADDING_TOKENS

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)

    return {
        "kv_cache": normal(*cache_shape),
        # Scaled products of a spread of 1: with larger ones each token would see a single key.
        "q": normal(num_tokens, num_q_heads, head_dim) / (layer.attention.scale * head_dim**0.5),
        "k": normal(num_tokens, cache.num_kv_heads, head_dim),
        "v": normal(num_tokens, cache.num_kv_heads, head_dim),
        "positions": jnp.asarray(_positions(num_query, seq_lens, num_tokens)),
        "block_tables": jnp.asarray(tables),
        "seq_lens": jnp.asarray(seq_lens),
        "query_start_loc": jnp.asarray(np.concatenate([[0], np.cumsum(num_query)]), jnp.int32),
        "sinks": MEAN_SINK + normal(num_q_heads) if layer.attention.has_sinks else None,
    }


def _positions(
    num_query: Sequence[int], seq_lens: Sequence[int], num_tokens: int
) -> np.ndarray:  # i32[num_tokens]
    positions = np.zeros(num_tokens, np.int32)
    own = [np.arange(n - q, n) for q, n in zip(num_query, seq_lens, strict=True)]
    positions[: sum(num_query)] = np.concatenate(own)
    return positions


def _run_layer(
    inputs: dict[str, jax.Array | None], rules: dict[str, object], chosen: dict[str, object]
) -> tuple[np.ndarray, np.ndarray]:
    """Attention's output, and the cache after one layer and a block copy, as float32."""

    def layer(inputs: dict[str, jax.Array | None]) -> tuple[jax.Array, jax.Array]:
        kv_cache = inputs["kv_cache"]
        num_rows, num_halves, _, block_size, _ = kv_cache.shape
        num_blocks = num_halves // 2
        sequences = (inputs["block_tables"], inputs["seq_lens"], inputs["query_start_loc"])
        slots = pallas_kernels.slot_mapping(
            *(inputs["positions"][None], sequences[0][None], sequences[2]),
            block_size=block_size,
            pad_slot=pallas_kernels.pad_slot(num_rows, num_blocks, block_size),
            **chosen,
        )[0]
        kv_cache = pallas_kernels.kv_scatter(
            *(kv_cache, inputs["k"], inputs["v"], slots, 0), **chosen
        )
        out = pallas_kernels.paged_attention(
            *(inputs["q"], kv_cache, 0, *sequences), sinks=inputs["sinks"], **rules, **chosen
        )
        # A chain, to be read before it is written, and padding.
        sources, targets = jnp.array([1, 2, 0]), jnp.array([2, 3, num_blocks])
        pages = kv_cache.reshape(num_rows, num_blocks, -1)
        pages = pallas_kernels.block_copy(pages, sources, targets, **chosen)
        return out, pages.reshape(kv_cache.shape)

    results = jax.device_get(jax.jit(layer)(inputs))
    return tuple(np.asarray(array, np.float32) for array in results)
