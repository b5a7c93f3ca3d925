"""`LineFile`: an output file that contains only whole lines, even after an interrupted write."""

import contextlib
import os
import stat
import sys
from types import TracebackType
from typing import Self

STDIO = "-"


class LineFile:
    """Writes lines to a file, or to stdout if the path is "-". Use it in a `with` statement.

    Each line is written by one system call, unless the system writes only a part. If a write is
    interrupted or the disk is full, the incomplete line is removed from a regular file. Stdout is
    never truncated.

    Raises:
        OSError: The file cannot be opened for writing.
    """

    def __init__(self, path: str) -> None:
        if path == STDIO:
            self._fd = os.dup(sys.stdout.fileno())
        else:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        is_regular = stat.S_ISREG(os.fstat(self._fd).st_mode)
        self._can_be_truncated = is_regular and path != STDIO
        self._num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._fd)

    def clear(self) -> None:
        """Deletes the old contents of the file. Opening the file keeps them."""
        if self._can_be_truncated:
            os.ftruncate(self._fd, 0)

    def write_line(self, line: bytes) -> None:
        """Appends `line` and a line break.

        Raises:
            OSError: The line cannot be written.
        """
        rest = memoryview(line + b"\n")
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except BaseException:
            if self._can_be_truncated:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, self._num_bytes)
            raise
        self._num_bytes += len(line) + 1
