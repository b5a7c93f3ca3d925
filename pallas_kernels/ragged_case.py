"""`RaggedCase`: fields of example inputs that all ops over the tokens of requests share."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedCase:
    """Sizes of one example, with the number of new tokens of each request."""

    name: str
    counts: tuple[int, ...]
    num_padding: int = 0  # tokens of no request, after all others
    first_positions: tuple[int, ...] | None = None  # of each request's tokens; None: not known
    dtype: str = "float32"  # of everything except states and constant decays

    @property
    def positions(self) -> jax.Array | None:
        """The argument of this name; None if it is left out."""
        if self.first_positions is None:
            return None
        starts = zip(self.first_positions, self.counts, strict=True)
        of_requests = [first + np.arange(count) for first, count in starts]
        padding = np.zeros(self.num_padding)
        return jnp.asarray(np.concatenate([*of_requests, padding]), jnp.int32)

    @property
    def has_one_token_each(self) -> bool:
        """Whether `step_rows` can compute the step: each row is a request's token, or padding."""
        num_reqs, num_decodes = len(self.counts), self.counts.count(1)
        has_decodes_first = self.counts == (1,) * num_decodes + (0,) * (num_reqs - num_decodes)
        return has_decodes_first and num_decodes + self.num_padding == num_reqs
