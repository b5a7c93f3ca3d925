"""The loop of an engine core: messages, then a step, until it is told to end."""

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
        """All messages that wait now or come within `wait_s`; None waits for the first."""
        ...

    def send(self, data: bytes) -> None:
        """Queues a message; never waits."""
        ...

    def note_step(self) -> None:
        """Tells whoever watches that another step is done."""
        ...


def run_core(core: EngineCore, channel: CoreChannel) -> EngineDead:
    """Runs a core to its end; returns what its client is to hear last.

    The core is not closed, so that the client can be told first.
    """
    try:
        _run_until_shutdown(core, channel)
    # Whatever it is, the engine is not to be trusted afterwards.
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
            # Whether the next step can wait even longer, or the engine is to end.
            continue
        if core.has_work and not core.is_finished:
            channel.send(wire.encode(core.step()))
            channel.note_step()
