"""`OwnerProcess`: the process that may use an engine. Forks of that process may not."""

import os

from paxkv.errors import ForkedProcessError


class OwnerProcess:
    """Remembers the process that creates it.

    `os.fork` copies memory but no threads. In the child process, an engine would look alive, and
    its answers would never come.

    Args:
        name: Name of the owned object for the error message, such as "this LLM".
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = os.getpid()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in this process."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Does nothing in the process that created the object.

        Raises:
            ForkedProcessError: The caller runs in a fork of that process.
        """
        if not self.is_current:
            raise ForkedProcessError(
                f"{self._name} was created in process {self._pid}, and process {os.getpid()} is a "
                "fork of it, in which the engine's threads do not exist. Create it in the process "
                "that uses it, and start that process without a fork: with the multiprocessing "
                "start method 'spawn'."
            )
