"""Compares the greedy tokens of two engines, and finds how close the logits are at differences."""

import dataclasses
from collections.abc import Callable, Sequence

from benchmarks.workloads import Workload

# (preceding tokens, first token, second token) -> logit of the first minus logit of the second.
LogitGap = Callable[[list[int], int, int], float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenDifference:
    """The first differing token of one request.

    Args:
        position: Index among the request's new tokens.
        logit_gap: Logit of `wanted` minus logit of `got` after all preceding tokens; None if no
            engine can compute it. If it is only a rounding error, both tokens are right.
    """

    request_idx: int
    position: int
    wanted: int
    got: int
    logit_gap: float | None

    def is_tie(self, tie_gap: float) -> bool:
        return self.logit_gap is not None and abs(self.logit_gap) <= tie_gap

    def __str__(self) -> str:
        gap = "unknown" if self.logit_gap is None else f"{self.logit_gap:.2e}"
        return (
            f"request {self.request_idx}, new token {self.position}: got {self.got}, wanted "
            f"{self.wanted}, whose logit is higher by {gap}"
        )


def differences(
    workload: Workload,
    wanted: Sequence[Sequence[int]],
    got: Sequence[Sequence[int]],
    logit_gap: LogitGap | None,
) -> list[TokenDifference]:
    """The first difference of every request with one.

    Args:
        wanted, got: New tokens of every request.
        logit_gap: Computes `TokenDifference.logit_gap`.
    """
    found = []
    requests = zip(workload.requests, wanted, got, strict=True)
    for request_idx, (request, wanted_ids, got_ids) in enumerate(requests):
        pairs = enumerate(zip(wanted_ids, got_ids, strict=True))
        position = next((idx for idx, (w, g) in pairs if w != g), None)
        if position is None:
            continue
        before = [*request.prompt_token_ids, *wanted_ids[:position]]
        choice = wanted_ids[position], got_ids[position]
        found.append(
            TokenDifference(
                request_idx=request_idx,
                position=position,
                wanted=choice[0],
                got=choice[1],
                logit_gap=None if logit_gap is None else logit_gap(before, *choice),
            )
        )
    return found
