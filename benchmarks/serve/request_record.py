"""RequestRecord: one request, its answer, and when each part arrived."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request as its client saw it. Times are seconds since the load began.

    Args:
        due_s: When the request arrived.
        sent_s: When it was sent; later than `due_s` if it waited for another request.
        chunk_times_s: When each piece of the stream with new tokens arrived.
        end_s: When the stream ended or failed.
        num_prompt_tokens: The server's count; None if the server sent none.
        num_output_tokens: See `counted_by`.
        counted_by: "usage" is the server's count; "chunks" counts pieces as tokens, because the
            server sent no usage.
        num_asked_tokens: Most tokens of the output.
        text: The answer, or the part before the failure.
        error: Why the request failed; None if it was answered completely.
    """

    due_s: float
    sent_s: float
    chunk_times_s: tuple[float, ...] = ()
    end_s: float
    num_prompt_tokens: int | None = None
    num_output_tokens: int = 0
    counted_by: Literal["usage", "chunks"] = "chunks"
    num_asked_tokens: int
    text: str = ""
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """Time to first token, from sending."""
        return self.chunk_times_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        """From sending to the last token."""
        return self.chunk_times_s[-1] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None without a second token."""
        if self.num_output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_output_tokens - 1)

    @property
    def itls_s(self) -> list[float]:
        """Times between consecutive pieces with new tokens."""
        times = self.chunk_times_s
        return [after - before for before, after in zip(times, times[1:], strict=False)]
