"""JAX's profiler, one recording at a time."""

import jax

from paxkv.errors import PaxkvError


class Profiler:
    """Records what host and device do between `start` and `stop`, for TensorBoard or XProf."""

    def __init__(self) -> None:
        self._folder: str | None = None

    def start(self, folder: str) -> bool:
        """Begins to record; False, and nothing changed, while a recording runs.

        Raises:
            PaxkvError: JAX cannot, or someone else in this process records.
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
        """Writes what was recorded; False where nothing was.

        Raises:
            PaxkvError: It cannot be written; the recording is over all the same.
        """
        if self._folder is None:
            return False
        folder, self._folder = self._folder, None
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError, ValueError) as error:
            raise PaxkvError(f"cannot write the profile into {folder!r}: {error}") from error
        return True
