"""`WaitingBudget`: limits the bytes that wait for slow readers in all streams together."""

# Eight streams of the largest size that one stream may have.
DEFAULT_MAX_WAITING_BYTES = 256 * 2**20


class WaitingBudget:
    """Counts the packed bytes that wait in all streams of a client.

    Args:
        max_bytes: Maximum of waiting bytes; at least 1.
    """

    def __init__(self, max_bytes: int = DEFAULT_MAX_WAITING_BYTES) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0

    @property
    def is_exceeded(self) -> bool:
        return self.num_bytes > self.max_bytes
