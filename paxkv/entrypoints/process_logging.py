"""Logging of the server process and of engine processes."""

import datetime
import logging

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class UtcFormatter(logging.Formatter):
    """Starts each line with the time in UTC: 2026-01-31T23:59:59.123Z."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """Overrides the local time of the base class."""
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03}Z"


def set_up_logging() -> None:
    """Logs warnings of all packages, and also paxkv's information, such as the memory plan."""
    handler = logging.StreamHandler()
    handler.setFormatter(UtcFormatter(_FORMAT))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("paxkv").setLevel(logging.INFO)
