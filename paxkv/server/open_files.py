"""Raises the limit of open files, because each connection is an open file."""

import logging
import resource

from paxkv.errors import ConfigError

logger = logging.getLogger(__name__)

# Files that are not connections: weights, logs, the engine's channels, the listening socket.
NUM_OTHER_FILES = 512
MOST_CONNECTIONS = 65_000
# The server warns if fewer are possible, because clients keep idle connections open.
_FEW_CONNECTIONS = 10_000
_UNLIMITED = resource.RLIM_INFINITY


def allow_connections(max_connections: int | None) -> int:
    """Raises the process's soft limit of open files as far as needed and allowed.

    Args:
        max_connections: Connections that must be possible; None means as many as possible, up to
            `MOST_CONNECTIONS`.

    Returns:
        The number of connections that may be open at once.

    Raises:
        ConfigError: The hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == _UNLIMITED:
        return MOST_CONNECTIONS if max_connections is None else max_connections
    num_wanted = (max_connections or MOST_CONNECTIONS) + NUM_OTHER_FILES
    num_files = num_wanted if hard == _UNLIMITED else min(num_wanted, hard)
    if num_files > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, hard))
    num_connections = max(num_files, soft) - NUM_OTHER_FILES
    if num_connections < (max_connections or 1):
        num_needed = (max_connections or 1) + NUM_OTHER_FILES
        # Without room for one connection, a smaller number does not help.
        smaller = "" if num_connections < 1 else f", or set --max-connections to {num_connections}"
        raise ConfigError(
            f"the process may have {max(num_files, soft)} open files, {NUM_OTHER_FILES} of which "
            f"are not for connections; {max_connections or 1} connections must be possible. Raise "
            f"the hard limit to at least {num_needed} (ulimit -Hn, or LimitNOFILE of "
            f"systemd){smaller}."
        )
    if max_connections is not None:
        return max_connections
    if num_connections < _FEW_CONNECTIONS:
        logger.warning(
            "at most %d connections may be open: the hard limit of open files is %d. Raise it "
            "with ulimit -Hn, or LimitNOFILE of systemd.",
            num_connections,
            hard,
        )
    return min(num_connections, MOST_CONNECTIONS)
