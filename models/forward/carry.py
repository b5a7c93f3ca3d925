"""`Carry`: what one layer passes to the next."""

from dataclasses import dataclass

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Carry:
    """The residual stream alone. A family whose layers share more derives a class of its own.

    Only the family's own code reads it. Every layer takes and returns the same structure, dtypes
    and shapes; only the last one may return fewer tokens.
    """

    hidden: jax.Array  # f[num_tokens, hidden]
