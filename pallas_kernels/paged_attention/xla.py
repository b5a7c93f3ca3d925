"""Fast plain-JAX body of `paged_attention`: one loop over blocks, and one over tiles.

Requests with one query token share the loop over their blocks. Longer requests use the loop over
tiles. The device computes both trip counts, so the cost does not depend on the longest context, and
one compiled program serves every mix of requests.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.xla_decode import attend_decode_rows
from pallas_kernels.paged_attention.xla_prefill import attend_prefill_rows
from pallas_kernels.paged_attention.xla_problem import AttentionProblem, make_problem


def paged_attention_xla(
    *arrays: jax.Array, max_query_len: int | None, **rules: object
) -> tuple[jax.Array, jax.Array]:  # f[num_tokens, num_q_heads, head_dim], f32[num_tokens, ...]
    """See `api.paged_attention`."""
    problem = make_problem(*arrays, **rules)
    return problem.by_query_head(*attend_all_rows(problem, max_query_len))


def attend_all_rows(
    problem: AttentionProblem, max_query_len: int | None
) -> tuple[jax.Array, jax.Array]:
    """Attends all query tokens.

    Returns:
        Output f32[num_tokens, num_kv_heads, group_size, value_dim] and lse f32[num_tokens,
        num_kv_heads, group_size].
    """
    if max_query_len == 1:
        out = jnp.zeros(problem.out_shape, jnp.float32)
        lse = jnp.full(problem.out_shape[:-1], -jnp.inf, jnp.float32)
    else:
        out, lse = attend_prefill_rows(problem)
    # In steps with prompts, sharing a prefix saves little: most of the time goes into prompts.
    decode_out, decode_lse, is_decode = attend_decode_rows(
        problem, looks_for_shared_prefix=max_query_len == 1
    )
    query_token = jnp.where(is_decode, problem.query_start_loc[:-1], problem.q.shape[0])
    out = out.at[query_token].set(decode_out, mode="drop", wrap_negative_indices=False)
    lse = lse.at[query_token].set(decode_lse, mode="drop", wrap_negative_indices=False)
    return out, lse
