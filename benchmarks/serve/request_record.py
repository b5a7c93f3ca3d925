"""RequestRecord: what one request asked for, what came back and when."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request as its client saw it. Times are seconds since the load began.

    Args:
        due_s: When the arrival process wanted it sent.
        sent_s: When it was sent; later than `due_s` where it had to wait for another to end.
        chunk_times_s: When each piece of the stream came that holds new tokens.
        end_s: When the stream was over, or failed.
        num_prompt_tokens: As the server counted them; None if it does not say.
        num_output_tokens: See `counted_by`.
        counted_by: "usage" is the server's own count; "chunks" counts pieces as tokens, because
            the server sent no usage.
        num_asked_tokens: Length that the output may have.
        text: The whole answer, or what came of it before it failed.
        error: Why it failed; None for a request that was answered to its end.
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
        """Time per output token after the first; None where there is no second one."""
        if self.num_output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_output_tokens - 1)

    @property
    def itls_s(self) -> list[float]:
        """Times between one piece with new tokens and the next."""
        times = self.chunk_times_s
        return [after - before for before, after in zip(times, times[1:], strict=False)]
