"""A bias of the logits that each query mixes from profiles over the distance to a key."""

import jax
import jax.numpy as jnp

from pallas_kernels.argument_checks import require_float, require_shape

# Why a Mosaic body refuses a call with `distance_factors`. The table of bodies shows it.
DISTANCE_BIAS_MISFIT = "only plain XLA adds a bias that is mixed from profiles of the distance"


def check_distance_bias(
    op_name: str,
    q: jax.Array,  # f[num_tokens, num_q_heads, head_dim]
    factors: jax.Array,
    profiles: jax.Array | None,
) -> None:
    """Checks the two arguments of the bias.

    Raises:
        ValueError: One is missing, or a shape or dtype does not fit.
    """
    if profiles is None:
        raise ValueError(f"{op_name}: distance_factors need distance_profiles; got None.")
    require_shape(op_name, "distance_profiles", profiles, ("num_profiles", "num_distances"))
    require_shape(op_name, "distance_factors", factors, (*q.shape[:2], profiles.shape[0]))
    require_float(op_name, distance_factors=factors, distance_profiles=profiles)


def profiles_by_distance(
    profiles: jax.Array,  # f[num_profiles, num_distances]
) -> jax.Array:  # f32[num_distances + 1, num_profiles]
    """A row for each distance, and a row of zeros for all larger distances."""
    return jnp.pad(profiles.astype(jnp.float32).T, ((0, 1), (0, 0)))


def distance_rows(
    distance: jax.Array,  # i32[...], the position of each key minus that of its query
    num_distances: int,
) -> jax.Array:  # i32[...], rows of `profiles_by_distance`
    has_profile = (distance <= 0) & (distance > -num_distances)
    return jnp.where(has_profile, -distance, num_distances)
