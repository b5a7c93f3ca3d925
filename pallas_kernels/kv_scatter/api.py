"""Public op `kv_scatter`: its contract, checks, and choice of implementation."""

import jax

from pallas_kernels.argument_checks import require_float, require_int32, require_shape
from pallas_kernels.cache_layout import check_kv_caches, check_row
from pallas_kernels.dispatch import Body, mosaic_bodies, run_op
from pallas_kernels.kv_scatter.reference import kv_scatter_reference
from pallas_kernels.kv_scatter.xla import kv_scatter_xla
from pallas_kernels.quantised_cache import check_scales, quantise
from pallas_kernels.target import Target

_BODIES: dict[str, Body] = {
    "reference": kv_scatter_reference,
    "xla": kv_scatter_xla,
    **mosaic_bodies("pallas_kernels.kv_scatter", "kv_scatter", "gpu", "tpu"),
}


def kv_scatter(
    k_cache: jax.Array,  # f[num_rows, num_blocks, num_kv_heads, block_size, head_dim] or quantised
    v_cache: jax.Array,  # f[num_rows, num_blocks, num_kv_heads, block_size, v_head_dim] likewise
    k: jax.Array,  # f[num_tokens, num_kv_heads, head_dim]
    v: jax.Array,  # f[num_tokens, num_kv_heads, v_head_dim]
    slots: jax.Array,  # i32[num_tokens]
    row: jax.Array | int,  # i32[]
    *,
    k_scale: jax.Array | None = None,  # f32[num_kv_heads]
    v_scale: jax.Array | None = None,  # f32[num_kv_heads]
    implementation: str | None = None,
    target: Target | None = None,
) -> tuple[jax.Array, jax.Array]:  # the two caches
    """Writes each token's key and value into its slot of one cache row.

    `k` and `v` are cast to the caches' dtypes, or quantised where these are int8 or float8_e4m3fn;
    numbers too large for either become the largest (`quantised_cache.py`). In place when the caller
    donates the caches and rebinds them, with two things to know:

    - `k` or `v` must depend on the last read of the cache, as a layer's do on the layer before it.
      If nothing orders a write after a read, XLA copies the whole cache to keep both.
    - On the CPU keep the caches in float32, float16 or int8: XLA:CPU copies a whole bfloat16 cache
      at each write (JAX 0.10.2 always, 0.12 when the same program reads the cache), and a whole
      float8_e4m3fn one (both).

    Args:
        slots: Slot inside one row, in `[0, num_blocks * block_size)`, no two alike; or any value
            from `pad_slot(...)` on, which is not written.
        row: Which row of the cache (the layer's index in its group), in `[0, num_rows)`.
        k_scale: What one step of a quantised key is worth, per KV head, above 0; `None` where the
            cache is not quantised. `v_scale` likewise for values.
        implementation: `None` picks the fastest body on `target`.
        target: What the program is compiled for; `None` is JAX's default device.

    Raises:
        ValueError: A shape, a dtype, a static row, a scale that is missing or too much, or the
            implementation's name does not fit. Values are traced, so they are not checked here.

    Source: `reshape_and_cache_flash` in vllm/csrc/cache_kernels.cu.
    """
    check_kv_caches("kv_scatter", k_cache, v_cache)
    check_row("kv_scatter", row, num_rows=k_cache.shape[0])
    require_shape("kv_scatter", "slots", slots, ("num_tokens",))
    require_int32("kv_scatter", slots=slots)
    (num_tokens,) = slots.shape
    num_kv_heads = k_cache.shape[2]
    require_shape("kv_scatter", "k", k, (num_tokens, num_kv_heads, k_cache.shape[-1]))
    require_shape("kv_scatter", "v", v, (num_tokens, num_kv_heads, v_cache.shape[-1]))
    require_float("kv_scatter", k=k, v=v)
    check_scales("kv_scatter", k_cache, v_cache, k_scale, v_scale)
    k, v = quantise(k, k_scale, k_cache.dtype), quantise(v, v_scale, v_cache.dtype)
    arguments = (k_cache, v_cache, k, v, slots, row)
    return run_op("kv_scatter", _BODIES, implementation, target, *arguments)
