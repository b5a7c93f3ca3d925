"""`SocketFolder`: where the sockets of two processes have their files until they are connected."""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
import weakref
from pathlib import Path

_PREFIX = "paxkv-engine-"
# Between its making and its lock a folder looks like one that nobody owns.
_MIN_STALE_S = 60.0
_OPEN_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class SocketFolder:
    """A folder of this user alone, so that nobody else can connect; it goes with its owner.

    Its owner keeps it locked: a folder that can be locked is one whose owner was killed.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        lock = os.open(self.path, _OPEN_FLAGS)
        # A file system without locks: nobody else can lock it either, and so it is left alone.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Also at the end of this process, whoever forgets `remove`.
        self._finalizer = weakref.finalize(self, _remove_and_unlock, self.path, lock)

    def remove(self) -> None:
        """May be repeated."""
        self._finalizer()


def remove_stale_folders() -> None:
    """Removes folders that this user's processes left behind when they were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        # It may be gone since, or not be ours to open.
        with contextlib.suppress(OSError):
            _remove_if_stale(path)


def _remove_if_stale(path: Path) -> None:
    """Removes a folder of ours that nobody has locked."""
    file = os.open(path, _OPEN_FLAGS)
    try:
        status = os.fstat(file)
        is_private = status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) == stat.S_IRWXU
        if is_private and time.time() - status.st_mtime >= _MIN_STALE_S:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
    finally:
        os.close(file)


def _remove_and_unlock(path: Path, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)
