"""The type of a TPU kernel's copy that runs beside it."""

from typing import Protocol


class AsyncCopy(Protocol):
    """What `pltpu.make_async_copy` returns."""

    def start(self) -> None: ...

    def wait(self) -> None: ...
