"""`FeatureDevice`: what a feature may use of the device between two steps."""

from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Sharding
from jax.stages import Compiled

from models import Pages
from paxkv.runner.shapes.own_program import OwnProgram


class FeatureDevice:
    """The KV cache, and the programs of features. Everything runs in the order of calls.

    Attributes:
        pages: The KV cache. After a program that donates the pages, set this to the pages that it
            returned.
    """

    def __init__(
        self,
        pages: Pages,
        *,
        sharding: Sharding,
        program: Callable[[OwnProgram, Pages], Compiled],
    ) -> None:
        self.pages = pages
        self._sharding = sharding
        self._program = program

    def program(self, shape: OwnProgram) -> Compiled:
        """The compiled program, one of `StepFeature.programs`."""
        return self._program(shape, self.pages)

    def put(self, array_np: np.ndarray) -> jax.Array:
        """Copies an array to the device."""
        return jax.device_put(array_np, self._sharding)
