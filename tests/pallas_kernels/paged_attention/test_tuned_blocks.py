"""Tests of `paged_attention/tuned_blocks.py`: all accepted calls have sizes that fit."""

import jax.numpy as jnp
import pytest

from pallas_kernels.paged_attention.tuned_blocks import (
    decode_config,
    max_group_size,
    padded_rows,
    swizzle_width,
    v_tile_width,
)

# Of an SM of compute capability 9.0, and what the system takes of it for each CTA.
SMEM_PER_SM, SMEM_RESERVED = 233_472, 1_024


@pytest.mark.parametrize("head_dim", [*range(16, 257, 16), *range(320, 513, 64)])
def test_ctas_fit_an_sm(head_dim):
    for group_size in (1, 8, 12, 16, max_group_size(head_dim)):
        config = decode_config(jnp.bfloat16, head_dim, group_size)
        smem_bytes = config.smem_bytes(2, head_dim, group_size)
        assert config.ctas_per_sm * (smem_bytes + SMEM_RESERVED) <= SMEM_PER_SM
        # A stage that is multiplied and at least one that is loaded meanwhile, on an SM.
        assert config.ctas_per_sm * config.num_stages >= 2


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256, 512])
def test_enough_bytes_are_in_flight(head_dim):
    """Bytes of K and V under way on an SM while each of its CTAs multiplies one tile."""
    config = decode_config(jnp.bfloat16, head_dim, 4)
    tile_bytes = config.kv_tile * head_dim * 2 * (1 if config.has_one_ring else 2)
    assert config.ctas_per_sm * (config.num_stages - 1) * tile_bytes >= 64 * 1024


def test_head_dim_128_has_two_ctas_an_sm():
    config = decode_config(jnp.bfloat16, 128, 4, device_kind="NVIDIA H200")
    assert (config.ctas_per_sm, config.num_programs) == (2, 264)


def test_tiles_of_wide_heads_share_a_ring():
    """Two rings of two tiles of 64 KiB each would not fit; three tiles do."""
    config = decode_config(jnp.bfloat16, 512, 8)
    assert (config.num_stages, config.has_one_ring, config.ctas_per_sm) == (3, True, 1)


def test_an_unknown_device_has_the_sizes_of_an_h200():
    known, unknown = (
        decode_config(jnp.bfloat16, 64, 4, device_kind=kind) for kind in ("NVIDIA H200", "cpu")
    )
    assert known == unknown


def test_too_wide_a_head_has_no_sizes():
    with pytest.raises(ValueError, match="no decode tile fits"):
        decode_config(jnp.bfloat16, 2048, 4)


def test_paddings():
    assert [padded_rows(size) for size in (1, 8, 9)] == [8, 8, 16]
    assert [v_tile_width(size) for size in (16, 64, 80)] == [64, 64, 128]
    assert [swizzle_width(size) for size in (64, 96, 80, 192)] == [64, 32, 16, 64]
