"""Named example inputs of `cascade_attention`, for tests and benchmarks.

They are examples of `paged_attention` whose requests are then made to begin with the same blocks.
"""

import dataclasses
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import cases as paged_attention_cases
from pallas_kernels.paged_attention.cases import PagedAttentionCase, PagedAttentionInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeAttentionCase:
    """A batch and how many of its leading blocks are common."""

    name: str
    num_common_blocks: int
    batch: PagedAttentionCase


# Every request has at least 32 tokens before its query tokens: four blocks of 8, or two of 16.
_REQUESTS = ((1, 40), (20, 70), (1, 33), (0, 0), (7, 39), (1, 64))


def _case(name: str, num_common_blocks: int, **batch: object) -> CascadeAttentionCase:
    batch = PagedAttentionCase(**({"name": name, "requests": _REQUESTS} | batch))
    return CascadeAttentionCase(name=name, num_common_blocks=num_common_blocks, batch=batch)


CASES: tuple[CascadeAttentionCase, ...] = (
    _case("two_blocks", 2),
    _case("one_of_two_blocks", 1),
    _case("nothing_common", 0),
    _case("one_request", 2, requests=((3, 40),), num_padding_tokens=0),
    _case("decode", 4, requests=((0, 0), (1, 33), (1, 50), (1, 40)), block_size=8),
    _case("padding_only", 1, requests=((0, 0), (0, 0)), max_blocks_per_req=2),
    # The third block is full in every request, but two query tokens stand inside it.
    _case("common_beyond_a_query", 3, requests=((1, 60), (2, 49), (1, 48))),
    _case(
        "long_prefix_mqa",
        3,
        requests=((1, 200), (70, 300), (1, 193)),
        num_kv_heads=1,
        block_size=64,
    ),
    _case("soft_cap_and_sinks", 2, soft_cap=1.5, has_sinks=True),
    _case("int8", 4, cache_dtype="int8", block_size=8, has_sinks=True),
    _case("float8", 2, cache_dtype="float8_e4m3fn", num_q_heads=8),
    _case("bfloat16", 2, dtype="bfloat16", has_sinks=True),
)


def build_inputs(case: CascadeAttentionCase, seed: int = 0) -> PagedAttentionInputs:
    """Draws the batch and lets its requests begin with the blocks of the first that has tokens.

    Of a request, and of the first, only blocks that are full are replaced, so nothing unwritten is
    reached. The keys and values that are not paged stay as drawn: they are not those of the result.
    """
    inputs = paged_attention_cases.build_inputs(case.batch, seed)
    has_query = [num_query > 0 for num_query, _ in case.batch.requests]
    if not any(has_query):
        return inputs
    block_tables_np = np.array(inputs.block_tables)
    num_full_np = np.asarray(inputs.seq_lens) // case.batch.block_size
    first = has_query.index(True)
    for req_idx, num_full in enumerate(num_full_np):
        if has_query[req_idx]:
            num_common = min(case.num_common_blocks, num_full, num_full_np[first])
            block_tables_np[req_idx, :num_common] = block_tables_np[first, :num_common]
    return dataclasses.replace(inputs, block_tables=jnp.asarray(block_tables_np))
