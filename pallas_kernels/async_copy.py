"""The type of an asynchronous copy in a TPU kernel."""

from typing import Protocol


class AsyncCopy(Protocol):
    """What `pltpu.make_async_copy` returns."""

    def start(self) -> None: ...

    def wait(self) -> None: ...
