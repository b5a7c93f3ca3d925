"""`StopStringFinder`: finds stop strings in text that arrives in pieces."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StopStringMatch:
    """A stop string that ended a text.

    Args:
        stop_string: The stop string that was found.
        num_chars: Length of the whole text up to the end of the stop string.
    """

    stop_string: str
    num_chars: int


class StopStringFinder:
    """Matches all stop strings together, character by character (Knuth-Morris-Pratt).

    The text ends where a stop string is first complete, so the result does not depend on how the
    text is cut into pieces. If several stop strings end at the same character, the longest counts.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        # Longest first, so that the first match at a character is the longest.
        self._stop_strings = sorted(dict.fromkeys(stop_strings), key=len, reverse=True)
        self._borders = [_border_lengths(stop) for stop in self._stop_strings]
        # Per stop string: how many of its leading characters match the end of the text so far.
        self._num_matched = [0] * len(self._stop_strings)
        self._num_chars = 0

    @property
    def num_held_chars(self) -> int:
        """Characters at the text's end that may still become part of a stop string."""
        return max(self._num_matched, default=0)

    def feed(self, text: str, *, may_end: bool = True) -> StopStringMatch | None:
        """Reads the next piece; returns the first match. Must not be called after a match.

        Args:
            may_end: Whether stop strings that are completed in this piece count.
        """
        if not self._stop_strings:
            return None
        for char in text:
            self._num_chars += 1
            for idx, stop in enumerate(self._stop_strings):
                num_matched = self._num_matched[idx]
                while num_matched and stop[num_matched] != char:
                    # The text ends "aba", the stop string is "abac", and the next character is
                    # "b": continue from the border "a".
                    num_matched = self._borders[idx][num_matched - 1]
                if stop[num_matched] == char:
                    num_matched += 1
                if num_matched == len(stop):
                    if may_end:
                        return StopStringMatch(stop_string=stop, num_chars=self._num_chars)
                    num_matched = self._borders[idx][-1]
                self._num_matched[idx] = num_matched
        return None


def _border_lengths(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix.

    "abac" -> [0, 0, 1, 0]: "aba" ends with its prefix "a".
    """
    borders = [0] * len(stop)
    length = 0
    for idx in range(1, len(stop)):
        while length and stop[length] != stop[idx]:
            length = borders[length - 1]
        if stop[length] == stop[idx]:
            length += 1
        borders[idx] = length
    return borders
