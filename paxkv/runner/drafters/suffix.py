"""`SuffixDrafter`: proposes the tokens that most often followed a request's last tokens.

It looks in the request itself, and in the answers of finished requests.

Source: SuffixDecoding, arXiv:2411.04975, with an index of n-grams instead of suffix trees.
"""

import itertools
from collections import Counter, deque
from collections.abc import Sequence

from paxkv.config.speculative_config import SuffixLimits
from paxkv.runner.drafters.base import Drafter, RequestDrafter

# Matches are looked up by the last four tokens, or else by the last one.
_ANCHOR_LENGTHS = (4, 1)
# Only the latest places of an anchor are remembered, so a proposal takes a bounded time.
_MAX_PLACES = 16
# All finished answers together. A token costs about 300 bytes.
MAX_CACHED_TOKENS = 1 << 18
# Follows each finished answer, so that no match goes from one answer into the next.
_END_OF_ANSWER = -1
# Most tokens that one lookup adds to the index, so that a long prompt delays no step for long.
MAX_INDEXED_TOKENS = 1024
# More than any token id needs.
_ID_BITS = 32


class TokenIndex:
    """Tokens, and the places where each n-gram of an anchor's length ends.

    The place of an n-gram is the number of tokens up to its end, counted from the first token that
    was ever added.
    """

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._num_dropped = 0
        # By length: n-gram -> its latest places, oldest first.
        self._places: dict[int, dict[int, list[int]]] = {n: {} for n in _ANCHOR_LENGTHS}
        self._num_indexed = 0

    def __len__(self) -> int:
        return len(self._token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        self._token_ids += token_ids

    def drop_first(self, num_tokens: int) -> None:
        """Removes the oldest tokens, which must be whole answers."""
        for length, places_of in self._places.items():
            for end in range(self._num_dropped + length, self._num_dropped + num_tokens + 1):
                ngram = self._ngram(end, length)
                places = [] if ngram is None else places_of.get(ngram)
                if places and places[0] == end:
                    places.pop(0)
                    if not places:
                        del places_of[ngram]
        del self._token_ids[:num_tokens]
        self._num_dropped += num_tokens
        self._num_indexed = max(self._num_indexed, self._num_dropped)

    def find(self, last_ids: Sequence[int]) -> tuple[int, list[int]]:
        """Finds the longest match of the last tokens that has a token after it.

        Tokens can be found after as many calls as it takes to index them.

        Returns:
            The length of the match, 0 if there is none; and its places, latest first.
        """
        self._index()
        for length in _ANCHOR_LENGTHS:
            if len(last_ids) < length:
                continue
            places = self._places[length].get(_pack(last_ids[-length:]), ())
            lengths = [(self._match_length(last_ids, end), end) for end in reversed(places)]
            longest = max((found for found, _ in lengths), default=0)
            if longest > 0:
                return longest, [end for found, end in lengths if found == longest]
        return 0, []

    def token_after(self, place: int) -> int | None:
        """The token after a place. None where an answer ends."""
        offset = place - self._num_dropped
        if offset >= len(self._token_ids) or self._token_ids[offset] == _END_OF_ANSWER:
            return None
        return self._token_ids[offset]

    def _match_length(self, last_ids: Sequence[int], end: int) -> int:
        """How many tokens before `end` are equal to the last tokens. 0 if no token follows."""
        if self.token_after(end) is None:
            return 0
        offset = end - self._num_dropped
        before = itertools.islice(reversed(last_ids), offset)
        for length, token_id in enumerate(before):
            if self._token_ids[offset - 1 - length] != token_id:
                return length
        return min(offset, len(last_ids))

    def _index(self) -> None:
        """Adds the n-grams of the next tokens to the index."""
        last = min(self._num_dropped + len(self._token_ids), self._num_indexed + MAX_INDEXED_TOKENS)
        for length, places_of in self._places.items():
            first = max(self._num_indexed + 1, self._num_dropped + length)
            for end in range(first, last + 1):
                ngram = self._ngram(end, length)
                if ngram is None:
                    continue
                places = places_of.setdefault(ngram, [])
                places.append(end)
                if len(places) > _MAX_PLACES:
                    places.pop(0)
        self._num_indexed = last

    def _ngram(self, end: int, length: int) -> int | None:
        """The n-gram that ends at a place. None if it contains the end of an answer."""
        offset = end - self._num_dropped
        token_ids = self._token_ids[offset - length : offset]
        return None if _END_OF_ANSWER in token_ids else _pack(token_ids)


class FinishedAnswers:
    """The latest answers of finished requests, the oldest of which are dropped first."""

    def __init__(self, *, max_requests: int, max_tokens: int) -> None:
        self._max_requests, self._max_tokens = max_requests, max_tokens
        self.index = TokenIndex()
        # Number of tokens of each answer, including the mark of its end.
        self._lengths: deque[int] = deque()

    def add(self, token_ids: Sequence[int]) -> None:
        if not token_ids or self._max_requests == 0:
            return
        kept = [*token_ids[1 - self._max_tokens :], _END_OF_ANSWER]
        while self._lengths and (
            len(self._lengths) >= self._max_requests
            or len(self.index) + len(kept) > self._max_tokens
        ):
            self.index.drop_first(self._lengths.popleft())
        self.index.extend(kept)
        self._lengths.append(len(kept))


class SuffixRequest(RequestDrafter):
    """Finds the last tokens of a request in its own tokens and in the finished answers.

    Only the longest match counts. Each place of the match votes for the token that follows it, and
    the token with most votes is the next draft. The places with this token then vote for the draft
    after it. The probability of a draft is the share of all places that voted for it.

    Example: 8 9 was followed by 5 6 twice, and by 5 7 once -> draft 5 with probability 1, and then
    draft 6 with 2/3.
    """

    def __init__(
        self, token_ids: Sequence[int], *, limits: SuffixLimits, finished: FinishedAnswers
    ) -> None:
        self._limits, self._finished = limits, finished
        self._own = TokenIndex()
        self._own.extend(token_ids)
        self._last_ids = list(token_ids[-limits.max_match :])
        self.answer: list[int] = []

    def extend(self, token_ids: Sequence[int]) -> None:
        self._own.extend(token_ids)
        self.answer += token_ids
        self._last_ids = [*self._last_ids, *token_ids][-self._limits.max_match :]

    def propose(self, max_drafts: int) -> list[int]:
        found = [
            (index, *index.find(self._last_ids)) for index in (self._own, self._finished.index)
        ]
        length = max(length for _, length, _ in found)
        voters = [
            (index, place)
            for index, of_index, places in found
            for place in places
            if of_index == length
        ]
        num_voters = len(voters)
        max_drafts = min(
            max_drafts,
            int(self._limits.max_spec_factor * length),
            self._limits.max_depth - length,
        )
        drafts: list[int] = []
        while len(drafts) < max_drafts:
            votes = [index.token_after(place) for index, place in voters]
            counts = Counter(token_id for token_id in votes if token_id is not None)
            if not counts:
                break
            # Of equally frequent tokens, the first voter's is chosen: the request's own places come
            # before those in answers, and later places before earlier ones.
            ((token_id, count),) = counts.most_common(1)
            if count < self._limits.min_token_prob * num_voters:
                break
            drafts.append(token_id)
            voters = [
                (index, place + 1)
                for (index, place), vote in zip(voters, votes, strict=True)
                if vote == token_id
            ]
        return drafts


class SuffixDrafter(Drafter):
    """Makes a `SuffixRequest` for each request, and keeps the answers of ended requests."""

    def __init__(self, limits: SuffixLimits, *, max_cached_tokens: int = MAX_CACHED_TOKENS) -> None:
        self._limits = limits
        self._finished = FinishedAnswers(
            max_requests=limits.max_cached_requests, max_tokens=max_cached_tokens
        )

    def start(self, token_ids: Sequence[int]) -> SuffixRequest:
        return SuffixRequest(token_ids, limits=self._limits, finished=self._finished)

    def end(self, request: SuffixRequest) -> None:
        self._finished.add(request.answer)


def _pack(token_ids: Sequence[int]) -> int:
    packed = 0
    for token_id in token_ids:
        packed = packed << _ID_BITS | token_id
    return packed
