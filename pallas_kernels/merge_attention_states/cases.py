"""Named example inputs of `merge_attention_states`, for tests and benchmarks."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeAttentionStatesCase:
    """Sizes of one example, and which of its states are empty.

    `empty_kinds` says which of a token's two states have seen no key: "both", "a", "b" or "none".
    Tokens use its entries in turn. Empty states hold NaN.
    """

    name: str
    num_tokens: int
    num_q_heads: int = 4
    v_head_dim: int = 32
    dtype: str = "float32"
    largest_lse: float = 8.0  # lse are drawn from -largest_lse to largest_lse
    empty_kinds: tuple[str, ...] = ("none",)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeAttentionStatesInputs:
    """Arguments of `merge_attention_states`."""

    out_a: jax.Array  # f[num_tokens, num_q_heads, v_head_dim]
    lse_a: jax.Array  # f32[num_tokens, num_q_heads]
    out_b: jax.Array  # f[num_tokens, num_q_heads, v_head_dim]
    lse_b: jax.Array  # f32[num_tokens, num_q_heads]

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """The positional arguments, in order."""
        return self.out_a, self.lse_a, self.out_b, self.lse_b


_ALL_KINDS = ("none", "a", "both", "b")

CASES: tuple[MergeAttentionStatesCase, ...] = (
    MergeAttentionStatesCase(name="one_token", num_tokens=1, num_q_heads=1, v_head_dim=1),
    MergeAttentionStatesCase(name="heads_of_128", num_tokens=7, num_q_heads=8, v_head_dim=128),
    MergeAttentionStatesCase(name="empty_states", num_tokens=9, empty_kinds=_ALL_KINDS),
    MergeAttentionStatesCase(name="nothing_seen", num_tokens=3, empty_kinds=("both",)),
    # The state with the smaller lse has weight 0. exp(lse) overflows or underflows.
    MergeAttentionStatesCase(name="far_apart", num_tokens=33, largest_lse=1e4),
    MergeAttentionStatesCase(
        name="bfloat16", num_tokens=9, dtype="bfloat16", empty_kinds=_ALL_KINDS
    ),
    MergeAttentionStatesCase(name="float16", num_tokens=9, dtype="float16", v_head_dim=80),
)


def build_inputs(case: MergeAttentionStatesCase, seed: int = 0) -> MergeAttentionStatesInputs:
    """Draws two states; an empty one has lse -inf and holds NaN."""
    rng = np.random.default_rng(seed)
    arrays: list[jax.Array] = []
    for name in ("a", "b"):
        out_np = rng.standard_normal((case.num_tokens, case.num_q_heads, case.v_head_dim))
        lse_np = rng.uniform(-case.largest_lse, case.largest_lse, out_np.shape[:2])
        for token_idx in range(case.num_tokens):
            if case.empty_kinds[token_idx % len(case.empty_kinds)] in (name, "both"):
                out_np[token_idx], lse_np[token_idx] = np.nan, -np.inf
        # `jnp.asarray` would compile a program for each dtype and shape.
        arrays.append(jax.device_put(out_np.astype(jnp.dtype(case.dtype))))
        arrays.append(jax.device_put(lse_np.astype(np.float32)))
    out_a, lse_a, out_b, lse_b = arrays
    return MergeAttentionStatesInputs(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
