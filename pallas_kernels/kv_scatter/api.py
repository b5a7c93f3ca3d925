"""Public op `kv_scatter`: its contract, checks, and choice of implementation."""

import jax
import jax.numpy as jnp

from pallas_kernels.argument_checks import require_float, require_int32, require_shape
from pallas_kernels.cache_layout import check_kv_cache, check_row
from pallas_kernels.dispatch import Body, mosaic_bodies, run_op
from pallas_kernels.kv_scatter.reference import kv_scatter_reference
from pallas_kernels.kv_scatter.xla import kv_scatter_xla
from pallas_kernels.stored_dtype import as_stored, check_kv_dtype
from pallas_kernels.target import Target

_OP = "kv_scatter"
_BODIES: dict[str, Body] = {
    "reference": kv_scatter_reference,
    "xla": kv_scatter_xla,
    **mosaic_bodies("pallas_kernels.kv_scatter", "kv_scatter", "gpu", "tpu"),
}


def kv_scatter(
    kv_cache: jax.Array,  # [num_rows, 2 * num_blocks, num_kv_heads, block_size, head_dim]
    k: jax.Array,  # f[num_tokens, num_kv_heads, head_dim]
    v: jax.Array | None,  # f[num_tokens, num_kv_heads, head_dim]
    slots: jax.Array,  # i32[num_tokens]
    row: jax.Array | int,  # i32[]
    *,
    kv_dtype: jnp.dtype | None = None,
    implementation: str | None = None,
    target: Target | None = None,
) -> jax.Array:  # the cache
    """Writes each token's key and value into its slot of one cache row.

    The keys of block b are at index 2 * b of the cache's second axis, its values at 2 * b + 1
    (`cache_layout.py`). `k` and `v` are cast to the cache's dtype; numbers too large for it become
    its largest number. The write is in place if the caller donates the cache and rebinds it, on two
    conditions:

    - The values of `k` or `v` must depend on the last read of the cache, as a layer depends on the
      layer before it. If nothing orders a write after a read, XLA copies the whole cache.
    - On the CPU, the cache must be float32, float16 or uint16. XLA:CPU copies a whole bfloat16
      cache at each write (JAX 0.10.2 always, 0.12 if the same program reads the cache). With
      uint16, `kv_dtype` names the float whose bits are stored.

    Args:
        kv_cache: A float of 16 bits or more, or uint16 with `kv_dtype`.
        v: As wide as `k`; pad narrower values. `None` if a token has one vector for all uses
            (`latent_attention`). The cache then holds only `k` and is `[num_rows, num_blocks,
            num_kv_heads, block_size, head_dim]`.
        slots: Slot inside one row, in `[0, num_blocks * block_size)`, all different. A token whose
            slot is `pad_slot(num_rows, num_blocks, block_size)` or more is not written.
        row: Which row of the cache (the layer's index in its group), in `[0, num_rows)`.
        kv_dtype: The float whose bits a uint16 cache holds, float16 or bfloat16; `None` for any
            other cache. Only the bodies in plain XLA and the reference support it.
        implementation: `None` picks the fastest body on `target`.
        target: What the program is compiled for; `None` is JAX's default device.

    Raises:
        ValueError: A shape, a dtype, a static row or the implementation's name does not fit. Values
            are traced, so they are not checked here.

    Source: `reshape_and_cache_flash` in vllm/csrc/cache_kernels.cu.
    """
    check_kv_cache(_OP, kv_cache, num_parts=1 if v is None else 2)
    check_row(_OP, row, num_rows=kv_cache.shape[0])
    require_shape(_OP, "slots", slots, ("num_tokens",))
    require_int32(_OP, slots=slots)
    _, _, num_kv_heads, _, head_dim = kv_cache.shape
    parts = {"k": k} if v is None else {"k": k, "v": v}
    for arg_name, part in parts.items():
        require_shape(_OP, arg_name, part, (slots.shape[0], num_kv_heads, head_dim))
    require_float(_OP, **parts)
    check_kv_dtype(_OP, kv_cache.dtype, kv_dtype)
    k = as_stored(k, kv_cache.dtype, kv_dtype)
    v = None if v is None else as_stored(v, kv_cache.dtype, kv_dtype)
    return run_op(_OP, _BODIES, implementation, target, *(kv_cache, k, v, slots, row))
