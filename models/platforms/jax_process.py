"""Detects processes in which JAX would wait forever, because they were forked after JAX started."""

import functools
import os

from models.errors import ModelError


@functools.cache  # a fork inherits the value
def _pid_of_jax() -> int:
    return os.getpid()


def check_not_forked() -> None:
    """Remembers the process of the first call, in which JAX starts its threads.

    Raises:
        ModelError: This process is a fork of that one. Threads of JAX do not exist in it, so
            compiled programs would never end.
    """
    if os.getpid() != _pid_of_jax():
        raise ModelError(
            f"process {os.getpid()} is a fork of process {_pid_of_jax()}, which has loaded a model "
            "before. JAX's threads do not exist in a fork. Start this process with the "
            "multiprocessing start method 'spawn', or load the first model after the fork."
        )
