"""`OwnProgram`: a compiled program that a feature has besides steps and bursts."""

import abc

import jax
from jax.sharding import Sharding
from jax.stages import Lowered

from models import LoadedModel, Pages


class OwnProgram(abc.ABC):
    """A program such as an encoder, or a copy of blocks to the host.

    Derive a frozen dataclass of integers and strings, with a field for each size: its repr names
    the stored program. It is compiled in the warm-up, and counted in the memory plan.
    """

    @abc.abstractmethod
    def lower(
        self,
        model: LoadedModel,
        params: tuple[jax.Array, ...],
        pages: Pages,
        sharding: Sharding,
    ) -> Lowered:
        """Traces the program and lowers it.

        Args:
            pages: May be abstract. A program that writes to them donates them.
            sharding: Of arrays that come from the host.
        """
