"""Protocol of the message channel between a client and an engine core."""

from typing import Protocol

from paxkv.contracts.engine_output import EngineOutput
from paxkv.contracts.engine_request import EngineInput


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
