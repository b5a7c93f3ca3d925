"""Public op `merge_attention_states`: its contract, checks, and choice of implementation."""

import jax
import jax.numpy as jnp

from pallas_kernels.argument_checks import require_float, require_shape
from pallas_kernels.dispatch import Body, run_op
from pallas_kernels.merge_attention_states.reference import merge_attention_states_reference
from pallas_kernels.merge_attention_states.xla import merge_attention_states_xla
from pallas_kernels.target import Target

_OP = "merge_attention_states"
_BODIES: dict[str, Body] = {
    "reference": merge_attention_states_reference,
    "xla": merge_attention_states_xla,
}


def merge_attention_states(
    out_a: jax.Array,  # f[num_tokens, num_q_heads, v_head_dim]
    lse_a: jax.Array,  # f32[num_tokens, num_q_heads]
    out_b: jax.Array,  # f[num_tokens, num_q_heads, v_head_dim]
    lse_b: jax.Array,  # f32[num_tokens, num_q_heads]
    *,
    implementation: str | None = None,
    target: Target | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Merges attention over two disjoint sets of keys into attention over their union.

    An lse is the logarithm of a softmax's denominator, so the two outputs are weighted by
    `exp(lse)`: with lse [ln 1, ln 3] and outputs [4, 8] the result is (1 * 4 + 3 * 8) / 4 = 7 and
    ln 4. Up to rounding, the op is associative and commutative. Merging with a state without keys
    (lse -inf) changes nothing.

    Args:
        out_a: Output of attention over one set of keys. It may hold anything where its lse is -inf.
        lse_a: As `paged_attention(..., return_lse=True)` gives it, below +inf. Only one of the two
            may include a sink.
        implementation: `None` picks the fastest body on `target`.
        target: What the program is compiled for; `None` is JAX's default device.

    Returns:
        The output in out_a's dtype, computed in float32, and its lse, f32[num_tokens, num_q_heads].
        They are zero and -inf where both lse are -inf.

    Raises:
        ValueError: A shape, a dtype, or the implementation's name does not fit.

    Source: FlashInfer, arXiv:2501.01005, section 2.2; `merge_attn_states.cu` in vllm/csrc.
    """
    require_shape(_OP, "out_a", out_a, ("num_tokens", "num_q_heads", "v_head_dim"))
    require_shape(_OP, "lse_a", lse_a, out_a.shape[:2])
    require_shape(_OP, "out_b", out_b, out_a.shape)
    require_shape(_OP, "lse_b", lse_b, out_a.shape[:2])
    require_float(_OP, out_a=out_a, out_b=out_b)
    for arg_name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        if lse.dtype != jnp.float32:
            raise ValueError(
                f"{_OP}: {arg_name} has the wrong dtype: got {lse.dtype}, wanted float32."
            )
    return run_op(_OP, _BODIES, implementation, target, out_a, lse_a, out_b, lse_b)
