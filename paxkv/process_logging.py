"""How a process of ours logs: the HTTP server's and the engine's alike."""

import logging


def set_up_logging() -> None:
    """Warnings of everybody, and our own few lines: how memory was planned, where events go."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("paxkv").setLevel(logging.INFO)
