"""The KV cache is one array of pages: zeros, of the platform's shape, and with countable slots."""

import jax
import numpy as np
import pytest

from models import Platform
from models.platforms import CPU, GPU, TPU
from paxkv.contracts.kv_cache_spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from paxkv.errors import ConfigError
from paxkv.runner.memory.device_mesh import device_mesh
from paxkv.runner.memory.kv_cache_arrays import (
    abstract_kv_cache,
    allocate_kv_cache,
    empty_kv_cache,
    kv_cache_dtype,
)

ON_CPU = CPU(num_threads=1, instruction_sets=frozenset())
MESH = device_mesh(jax.devices()[0])


def full_group(*names, block_size=8, num_kv_heads=2, head_size=16, dtype="float32", num_ranks=1):
    spec = FullAttentionSpec(
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        dtype=dtype,
        num_ranks=num_ranks,
    )
    return KVCacheGroupSpec(layer_names=names, kv_cache_spec=spec)


def make_config(num_blocks=6, **fields):
    """Three layers; a page is K and V of 2 heads of 16 numbers, for 8 tokens."""
    group = full_group("a", "b", "c", **fields)
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_groups=(group,))


NUM_NUMBERS = 2 * 2 * 8 * 16


@pytest.mark.parametrize(
    ("platform", "kv_dtype", "dtype", "page"),
    [
        (Platform(), "float32", "float32", (NUM_NUMBERS,)),
        (GPU(), "bfloat16", "bfloat16", (NUM_NUMBERS,)),
        (ON_CPU, "float32", "float32", (NUM_NUMBERS,)),
        # XLA for the CPU would copy a bfloat16 cache: the bits lie in integers.
        (ON_CPU, "bfloat16", "uint16", (NUM_NUMBERS,)),
        (ON_CPU, "float16", "uint16", (NUM_NUMBERS,)),
        # Memory of a TPU is tiled in lines of 128.
        (TPU(), "bfloat16", "bfloat16", (NUM_NUMBERS // 128, 128)),
    ],
    ids=lambda value: value.name if isinstance(value, Platform) else None,
)
def test_pages_are_zeros_in_the_shape_and_dtype_of_the_platform(platform, kv_dtype, dtype, page):
    config = make_config(dtype=kv_dtype)
    pages = allocate_kv_cache(config, MESH, platform, kv_dtype)
    assert (pages.shape, pages.dtype) == ((3, 6, *page), dtype)
    assert pages.nbytes == 3 * 6 * config.kv_cache_groups[0].kv_cache_spec.page_size_bytes
    assert not np.asarray(pages).any()
    abstract = abstract_kv_cache(config, MESH, platform, kv_dtype)
    inside = jax.eval_shape(lambda: empty_kv_cache(config, platform, kv_dtype))
    for other in (abstract, inside):
        assert (other.shape, other.dtype) == (pages.shape, pages.dtype)
    # Devices split pages, and not rows or blocks.
    assert pages.sharding == abstract.sharding
    assert tuple(pages.sharding.spec) == (None, None, "model")


def test_more_slots_than_int32_counts_is_a_config_error():
    with pytest.raises(ConfigError, match="too many slots"):
        abstract_kv_cache(make_config(num_blocks=2**26), MESH, Platform(), "float32")


def test_slots_count_the_group_with_the_longest_blocks():
    def abstract(num_blocks):
        groups = (full_group("a"), full_group("b", block_size=16, num_kv_heads=1))
        config = KVCacheConfig(num_blocks=num_blocks, kv_cache_groups=groups)
        return abstract_kv_cache(config, MESH, Platform(), "float32")

    # 2**30 slots are too many. 2**26 blocks have as many with 16 tokens, but only half with 8.
    assert abstract(2**26 - 1).shape[1] == 2**26 - 1
    with pytest.raises(ConfigError, match="too many slots.* got 1073741824 "):
        abstract(2**26)


def test_slots_count_the_tokens_of_one_context_rank():
    config = make_config(num_blocks=2**24, block_size=32, num_ranks=4)
    assert abstract_kv_cache(config, MESH, Platform(), "float32").shape[1] == 2**24


def test_cache_larger_than_the_memory_is_a_config_error():
    # 2**24 slots of 2**25 values: petabytes.
    config = make_config(num_blocks=2**19, head_size=2**23)
    with pytest.raises(ConfigError, match="no memory for a KV cache of .*smaller cpu_kv_cache_b"):
        allocate_kv_cache(config, MESH, Platform(), "float32")


def test_groups_share_one_array_with_the_rows_of_the_largest():
    sliding = SlidingWindowSpec(
        block_size=16, num_kv_heads=1, head_size=16, dtype="float32", sliding_window=9
    )
    groups = (
        full_group("a", "b", "c"),
        KVCacheGroupSpec(layer_names=("d", "e"), kv_cache_spec=sliding),
    )
    config = KVCacheConfig(num_blocks=6, kv_cache_groups=groups)
    pages = abstract_kv_cache(config, MESH, Platform(), "float32")
    assert pages.shape == (3, 6, NUM_NUMBERS)


def test_half_precision_is_stored_as_float32_on_the_cpu_only():
    assert kv_cache_dtype("bfloat16", ON_CPU) == "float32"
    assert kv_cache_dtype("float16", ON_CPU) == "float32"
    assert kv_cache_dtype("bfloat16", GPU()) == "bfloat16"


def test_kv_cache_dtype_is_accepted_where_the_platform_stores_it():
    for dtype in ("float32", "float16", "bfloat16"):
        assert kv_cache_dtype("float32", ON_CPU, dtype) == dtype
        assert kv_cache_dtype("bfloat16", ON_CPU, dtype) == dtype
    assert kv_cache_dtype("bfloat16", GPU(), "bfloat16") == "bfloat16"
    with pytest.raises(ConfigError, match=r"'float16'; on gpu a model in bfloat16 .* in bfloat16"):
        kv_cache_dtype("bfloat16", GPU(), "float16")
