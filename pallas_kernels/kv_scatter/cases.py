"""Named example inputs of `kv_scatter`, for tests and benchmarks."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cache_layout import pad_slot
from pallas_kernels.stored_dtype import as_stored


@dataclass(frozen=True, slots=True, kw_only=True)
class KVScatterCase:
    """Sizes of one example. Padding tokens are spread among the real ones."""

    name: str
    num_tokens: int = 12
    num_padding_tokens: int = 4
    num_rows: int = 3
    row: int = 1
    num_blocks: int = 6
    num_kv_heads: int = 2
    block_size: int = 16
    head_dim: int = 32
    has_v: bool = True  # False: one vector per token, as for latents of MLA
    dtype: str = "float32"
    is_uint16: bool = False  # the cache is uint16, the bits of `dtype`


@dataclass(frozen=True, slots=True, kw_only=True)
class KVScatterInputs:
    """Arguments of `kv_scatter`."""

    kv_cache: jax.Array  # [num_rows, 2 * num_blocks, num_kv_heads, block_size, head_dim]
    k: jax.Array  # f[num_tokens + num_padding_tokens, num_kv_heads, head_dim]
    v: jax.Array | None  # like k; None if the cache's second axis is num_blocks
    slots: jax.Array  # i32[num_tokens + num_padding_tokens]
    row: int
    kv_dtype: jnp.dtype | None  # what a cache of uint16 holds

    @property
    def arguments(self) -> tuple[jax.Array | int | None, ...]:
        """Arguments of the op by position."""
        return self.kv_cache, self.k, self.v, self.slots, self.row

    @property
    def body_arguments(self) -> tuple[jax.Array | int | None, ...]:
        """Arguments of a body by position. K and V have the cache's dtype."""
        jitted = jax.jit(as_stored, static_argnums=(1, 2))
        dtypes = (self.kv_cache.dtype, self.kv_dtype)
        k = jitted(self.k, *dtypes)
        v = None if self.v is None else jitted(self.v, *dtypes)
        return self.kv_cache, k, v, self.slots, self.row


CASES: tuple[KVScatterCase, ...] = (
    KVScatterCase(name="middle_row"),
    KVScatterCase(name="first_row_block_8", row=0, block_size=8, num_kv_heads=1, head_dim=80),
    KVScatterCase(name="last_row_block_32", row=2, block_size=32, num_kv_heads=8, head_dim=64),
    KVScatterCase(name="block_64_head_dim_128", block_size=64, head_dim=128),
    KVScatterCase(name="mla_without_v", num_kv_heads=1, head_dim=576, has_v=False),
    KVScatterCase(name="one_token", num_tokens=1, num_padding_tokens=0),
    KVScatterCase(name="one_token_without_v", num_tokens=1, num_padding_tokens=0, has_v=False),
    KVScatterCase(name="no_padding_every_slot", num_tokens=96, num_padding_tokens=0),
    KVScatterCase(name="padding_only", num_tokens=0, num_padding_tokens=8),
    KVScatterCase(name="bfloat16", dtype="bfloat16"),
)

# Only the bodies in plain XLA and the reference support these.
UINT16_CASES: tuple[KVScatterCase, ...] = (
    KVScatterCase(name="float16_as_uint16", dtype="float16", is_uint16=True),
    KVScatterCase(name="bfloat16_as_uint16", dtype="bfloat16", is_uint16=True),
    KVScatterCase(
        name="one_bfloat16_as_uint16",
        num_tokens=1,
        num_padding_tokens=0,
        num_kv_heads=1,
        dtype="bfloat16",
        is_uint16=True,
    ),
    KVScatterCase(
        name="latents_as_uint16", num_kv_heads=1, has_v=False, dtype="bfloat16", is_uint16=True
    ),
)


def build_inputs(case: KVScatterCase) -> KVScatterInputs:
    """Draws a cache, tokens and distinct slots; padding is at and past the padding slot."""
    rng = np.random.default_rng(0)
    num_slots = case.num_blocks * case.block_size
    num_all = case.num_tokens + case.num_padding_tokens
    slots_np = pad_slot(case.num_rows, case.num_blocks, case.block_size) + np.arange(num_all)
    real_tokens = rng.permutation(num_all)[: case.num_tokens]
    slots_np[real_tokens] = rng.permutation(num_slots)[: case.num_tokens]

    def draw(*shape: int) -> jax.Array:
        return jax.device_put(rng.standard_normal(shape).astype(jnp.dtype(case.dtype)))

    def draw_cache() -> jax.Array:
        num_entries = (2 if case.has_v else 1) * case.num_blocks
        shape = (case.num_rows, num_entries, case.num_kv_heads, case.block_size, case.head_dim)
        cache_np = rng.uniform(-1.0, 1.0, shape).astype(jnp.dtype(case.dtype))
        return jax.device_put(cache_np.view(np.uint16) if case.is_uint16 else cache_np)

    token_shape = (num_all, case.num_kv_heads, case.head_dim)
    return KVScatterInputs(
        kv_cache=draw_cache(),
        k=draw(*token_shape),
        v=draw(*token_shape) if case.has_v else None,
        slots=jax.device_put(slots_np.astype(np.int32)),
        row=case.row,
        kv_dtype=jnp.dtype(case.dtype) if case.is_uint16 else None,
    )
