"""`BatchInput`: reads the lines of a file one by one."""

import codecs
import contextlib
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from types import TracebackType
from typing import BinaryIO, Self

from paxkv.entrypoints.cli.line_file import STDIO


class BatchInput:
    """The lines of a file, or of stdin if the path is "-". Use it in a `with` statement.

    Lines are counted first, and read again during iteration, so that few of them are in memory.
    Stdin and pipes can be read only once, so they are copied to a temporary file.

    Attributes:
        num_lines: Number of lines that are not empty.

    Raises:
        OSError: The file cannot be read.
    """

    def __init__(self, path: str) -> None:
        with contextlib.ExitStack() as stack:
            file = sys.stdin.buffer if path == STDIO else stack.enter_context(open(path, "rb"))
            if path == STDIO or not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                file = stack.enter_context(_copied(file))
            self._file = file
            self.num_lines = sum(1 for _ in self)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Lines that are not empty, with their numbers, which begin at 1."""
        self._file.seek(0)
        for number, line in enumerate(self._file, start=1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield number, line.removesuffix(b"\n")


def _copied(file: BinaryIO) -> BinaryIO:
    copy = tempfile.TemporaryFile()
    try:
        shutil.copyfileobj(file, copy)
    except BaseException:
        copy.close()
        raise
    return copy
