"""`LineFile`: an output file that holds whole lines only, however the program ends."""

import contextlib
import os
import stat
import sys
from types import TracebackType
from typing import Self

STDIO = "-"


class LineFile:
    """Writes lines to a file, or to stdout as `-`; use it in a `with` statement.

    A line is written at once, by one system call unless the system takes less. A line that was
    interrupted or that did not fit on the disk is cut off again, where the file is a regular one.

    Raises:
        OSError: The file cannot be opened for writing.
    """

    def __init__(self, path: str) -> None:
        if path == STDIO:
            self._fd = os.dup(sys.stdout.fileno())
        else:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        is_regular = stat.S_ISREG(os.fstat(self._fd).st_mode)
        self._can_be_cut = is_regular and path != STDIO
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
        """Drops what the file held before; until then it is kept."""
        if self._can_be_cut:
            os.ftruncate(self._fd, 0)

    def write_line(self, line: bytes) -> None:
        """Appends a line, which comes without its line break.

        Raises:
            OSError: It cannot be written.
        """
        rest = memoryview(line + b"\n")
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except BaseException:
            if self._can_be_cut:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, self._num_bytes)
            raise
        self._num_bytes += len(line) + 1
