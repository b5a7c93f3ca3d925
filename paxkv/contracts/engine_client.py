"""Protocols of the message channel between a client and an engine core."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from paxkv.contracts.engine_output import EngineOutput
from paxkv.contracts.engine_request import EngineInput
from paxkv.contracts.engine_start import EngineReady


class EngineTransport(Protocol):
    """The client's end of the message channel to an engine core; safe from any thread."""

    def send(self, message: EngineInput) -> None:
        """Queues a message.

        Raises:
            EngineDeadError: The engine has ended.
        """
        ...

    def receive(self, timeout_s: float | None = None) -> EngineOutput | None:
        """Next message from the engine; None when `timeout_s` passed without one."""
        ...

    def close(self) -> None:
        """Ends the channel and waits for the engine to stop."""
        ...


class LoopTransport(Protocol):
    """The same for a client on an asyncio loop, which is called instead of waiting.

    Whoever starts engines again where one died says `EngineReady` each time one takes the place of
    the last.
    """

    def send(self, message: EngineInput) -> None:
        """As `EngineTransport.send`."""
        ...

    def deliver_on(
        self,
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[EngineOutput | EngineReady], None],
    ) -> None:
        """Calls `on_message` on the loop with every message from now on."""
        ...

    def give_up(self, reason: str) -> None:
        """Takes the engine for dead, because its messages cannot be used. Called on the loop.

        `on_message` hears `EngineDead`, and what comes of it, as if the engine had died.
        """
        ...

    def close(self) -> None:
        """As `EngineTransport.close`; called from another thread than the loop's."""
        ...
