"""The loop of an engine core: handles messages and runs steps until a shutdown."""

import logging
from collections.abc import Iterator
from typing import Protocol

from paxkv.contracts import wire
from paxkv.contracts.engine_output import EngineDead
from paxkv.engine.engine_core import EngineCore

logger = logging.getLogger(__name__)


class CoreChannel(Protocol):
    """The core's end of the message channel to its client."""

    def waiting_messages(self, wait_s: float | None) -> Iterator[bytes]:
        """Yields all messages that are queued or arrive within `wait_s`.

        Args:
            wait_s: None waits until the first message arrives, however long that takes.
        """
        ...

    def send(self, data: bytes) -> None:
        """Queues a message. Never waits."""
        ...

    def count_step(self) -> None:
        """Counts a finished step, for a client that watches the engine's progress."""
        ...


def run_core(core: EngineCore, channel: CoreChannel) -> EngineDead:
    """Runs a core until it ends; returns the last message for its client.

    The caller closes the core, after it has sent the message.
    """
    try:
        _run_until_shutdown(core, channel)
    # After any error, the state of the engine may be wrong, so the engine ends.
    except Exception as error:
        logger.exception("the engine died")
        return EngineDead(reason=f"{type(error).__name__}: {error}")
    return EngineDead(reason="it was shut down")


def _run_until_shutdown(core: EngineCore, channel: CoreChannel) -> None:
    while not core.is_finished:
        wait_s = core.spare_s if core.has_work else None
        for data in channel.waiting_messages(wait_s):
            reply = core.handle(wire.decode_input(data))
            if reply is not None:
                channel.send(wire.encode(reply))
        if wait_s:
            # Checks again whether the engine has ended, or can wait longer before the next step.
            continue
        if core.has_work and not core.is_finished:
            channel.send(wire.encode(core.step()))
            channel.count_step()
