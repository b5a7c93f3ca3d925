"""Public op `kv_scatter`: its contract, checks, and choice of implementation."""

import jax

from pallas_kernels.argument_checks import require_float, require_int32, require_shape
from pallas_kernels.cache_layout import check_kv_caches, check_row
from pallas_kernels.dispatch import select_body
from pallas_kernels.kv_scatter.pallas_portable import kv_scatter_pallas
from pallas_kernels.kv_scatter.reference import kv_scatter_reference
from pallas_kernels.kv_scatter.xla import kv_scatter_xla

_BODIES = {
    "reference": kv_scatter_reference,
    "xla": kv_scatter_xla,
    "pallas_interpret": kv_scatter_pallas,
}


def kv_scatter(
    k_cache: jax.Array,  # f[num_rows, num_blocks, num_kv_heads, block_size, head_dim]
    v_cache: jax.Array,  # f[num_rows, num_blocks, num_kv_heads, block_size, v_head_dim]
    k: jax.Array,  # f[num_tokens, num_kv_heads, head_dim]
    v: jax.Array,  # f[num_tokens, num_kv_heads, v_head_dim]
    slots: jax.Array,  # i32[num_tokens]
    row: jax.Array | int,  # i32[]
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:  # the two caches
    """Writes each token's key and value into its slot of one cache row.

    `k` and `v` are cast to the caches' dtypes. In place when the caller donates the caches and
    rebinds them, with two things to know:

    - `k` or `v` must depend on the last read of the cache, as a layer's do on the layer before it.
      If nothing orders a write after a read, XLA copies the whole cache to keep both.
    - On the CPU keep the caches in float32: XLA:CPU copies a whole bfloat16 cache at each write
      (JAX 0.10.2 always, 0.12 when the same program reads the cache).

    Args:
        slots: Slot inside one row, in `[0, num_blocks * block_size)`, no two alike; or any value
            from `pad_slot(...)` on, which is not written.
        row: Which row of the cache (the layer's index in its group), in `[0, num_rows)`.
        implementation: `None` picks the fastest body on this platform.

    Raises:
        ValueError: A shape, a dtype, a static row or the implementation's name does not fit.
            Values are traced, so they are not checked here.

    Source: `reshape_and_cache_flash` in vllm/csrc/cache_kernels.cu.
    """
    body = select_body("kv_scatter", _BODIES, implementation)
    check_kv_caches("kv_scatter", k_cache, v_cache)
    check_row("kv_scatter", row, num_rows=k_cache.shape[0])
    require_shape("kv_scatter", "slots", slots, ("num_tokens",))
    require_int32("kv_scatter", slots=slots)
    (num_tokens,) = slots.shape
    num_kv_heads = k_cache.shape[2]
    require_shape("kv_scatter", "k", k, (num_tokens, num_kv_heads, k_cache.shape[-1]))
    require_shape("kv_scatter", "v", v, (num_tokens, num_kv_heads, v_cache.shape[-1]))
    require_float("kv_scatter", k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    return body(k_cache, v_cache, k, v, slots, row)
