"""The checks of attention leave out no head size that a GPU kernel takes."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.ops.attention_checks import CHECKED
from pallas_kernels.paged_attention.cases import PagedAttentionCase
from pallas_kernels.paged_attention.mosaic_gpu_decode import decode_misfit
from pallas_kernels.paged_attention.mosaic_gpu_ragged import ragged_misfit


def is_decode(case: PagedAttentionCase) -> bool:
    return all(num_query <= 1 for num_query, _ in case.requests)


def is_taken(head_dim: int, *, decodes: bool, group_size: int = 1) -> bool:
    """Whether the Mosaic GPU body takes such heads in 16 bits: it decodes in both cases."""
    q = jax.ShapeDtypeStruct((4, group_size, head_dim), jnp.bfloat16)
    kv_cache = jax.ShapeDtypeStruct((1, 8, 1, 16, head_dim), jnp.bfloat16)
    if decode_misfit(q, kv_cache) is not None:
        return False
    return decodes or ragged_misfit(q, kv_cache, scale=1.0) is None


@pytest.mark.parametrize("decodes", [True, False])
def test_every_head_size_of_the_gpu_kernels_is_checked_in_16_bits(decodes: bool) -> None:
    cases = [case for case in CHECKED if case.dtype == "bfloat16" and is_decode(case) == decodes]
    taken = {head_dim for head_dim in range(8, 1025, 8) if is_taken(head_dim, decodes=decodes)}
    assert 512 in taken and {case.head_dim for case in cases} == taken


def test_widest_heads_are_checked_with_small_blocks_and_their_largest_group() -> None:
    cases = [case for case in CHECKED if (case.head_dim, case.dtype) == (512, "bfloat16")]
    largest = max(size for size in range(1, 65) if is_taken(512, decodes=True, group_size=size))
    for decodes in (True, False):
        of_kind = [case for case in cases if is_decode(case) == decodes]
        assert 16 in {case.block_size for case in of_kind}
        assert largest in {case.num_q_heads // case.num_kv_heads for case in of_kind}
