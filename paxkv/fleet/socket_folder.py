"""`SocketFolder`: holds the socket files of two processes until the processes are connected."""

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
# A younger folder may be new and not locked yet.
_MIN_STALE_S = 60.0
_OPEN_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class SocketFolder:
    """A temporary folder that only this user can read, so that other users cannot connect.

    Its process locks it and removes it at exit. If a process is killed, an unlocked folder remains.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        lock = os.open(self.path, _OPEN_FLAGS)
        # If the file system has no locks, other processes cannot lock the folder and so remove it.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Removes the folder at exit if `remove` was not called.
        self._finalizer = weakref.finalize(self, _remove_and_unlock, self.path, lock)

    def remove(self) -> None:
        """Removes the folder; may be repeated."""
        self._finalizer()


def remove_stale_folders() -> None:
    """Removes folders of this user's processes that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        # It may have been removed meanwhile, or belong to another user.
        with contextlib.suppress(OSError):
            _remove_if_stale(path)


def _remove_if_stale(path: Path) -> None:
    """Removes a folder of this user if no process holds its lock; otherwise raises OSError."""
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
