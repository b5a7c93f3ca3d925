"""How a process of ours logs: the HTTP server's and the engine's alike."""

import datetime
import logging

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class UtcFormatter(logging.Formatter):
    """Begins a line with when it was, in UTC: 2026-01-31T23:59:59.123Z."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """Overrides the local time of the base class, in its own form."""
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03}Z"


def set_up_logging() -> None:
    """Warnings of everybody, and our own few lines: how memory was planned, where events go."""
    handler = logging.StreamHandler()
    handler.setFormatter(UtcFormatter(_FORMAT))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("paxkv").setLevel(logging.INFO)
