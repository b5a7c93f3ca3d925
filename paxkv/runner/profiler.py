"""`Profiler`: records profiles with JAX, one at a time."""

import jax

from paxkv.errors import PaxkvError


class Profiler:
    """Records the work of host and device between `start` and `stop`, for TensorBoard or XProf."""

    def __init__(self) -> None:
        self._folder: str | None = None

    def start(self, folder: str) -> bool:
        """Starts a recording. Returns False and does nothing if a recording runs already.

        Raises:
            PaxkvError: JAX cannot record, or other code in this process records a profile.
        """
        if self._folder is not None:
            return False
        try:
            jax.profiler.start_trace(folder)
        except (OSError, RuntimeError, ValueError) as error:
            raise PaxkvError(f"cannot record a profile into {folder!r}: {error}") from error
        self._folder = folder
        return True

    def stop(self) -> bool:
        """Ends the recording and writes it. Returns False if no recording runs.

        Raises:
            PaxkvError: The recording cannot be written. It has ended nevertheless.
        """
        if self._folder is None:
            return False
        folder, self._folder = self._folder, None
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError, ValueError) as error:
            raise PaxkvError(f"cannot write the profile into {folder!r}: {error}") from error
        return True
