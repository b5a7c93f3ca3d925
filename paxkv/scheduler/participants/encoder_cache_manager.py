"""EncoderCacheManager: encoder outputs that the runner keeps, and the requests that need them."""

from paxkv.contracts.engine_request import MultiModalFeature
from paxkv.errors import InvariantError
from paxkv.scheduler.request import Request


class _Entry:
    """One item's output, and the (request id, input id) pairs that still need it."""

    __slots__ = ("holders", "num_tokens")

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.holders: set[tuple[str, int]] = set()


class EncoderCacheManager:
    """Encoder outputs by identifier, at most `cache_size` tokens in total.

    An output without holders stays cached until its room is needed, so that another request with
    the same item can use it. The output that has had no holder for the longest time is evicted
    first.

    Source: vLLM `v1/core/encoder_cache_manager.py`.
    """

    def __init__(self, cache_size: int) -> None:
        self.cache_size = cache_size
        self.num_free_tokens = cache_size
        self._entries: dict[str, _Entry] = {}
        # Identifiers without a holder, in the order of eviction.
        self._evictable: dict[str, None] = {}
        # Identifiers evicted since the last `drain_freed_identifiers`.
        self._freed: list[str] = []

    def is_cached(self, feature: MultiModalFeature) -> bool:
        return feature.identifier in self._entries

    def num_allocatable_tokens(self, kept: set[str]) -> int:
        """Tokens that are free, or can be freed without evicting the identifiers `kept`."""
        return self.num_free_tokens + sum(
            self._entries[identifier].num_tokens
            for identifier in self._evictable
            if identifier not in kept
        )

    def hold(self, request: Request, input_ids: list[int]) -> None:
        """Registers the request as a holder of its items `input_ids`, as far as they are cached."""
        for input_id in input_ids:
            identifier = request.mm_features[input_id].identifier
            entry = self._entries.get(identifier)
            if entry is not None:
                entry.holders.add((request.request_id, input_id))
                self._evictable.pop(identifier, None)

    def allocate(self, request: Request, input_id: int) -> None:
        """Allocates room for an item that the step encodes, with the request as its holder.

        Raises:
            InvariantError: There is no room, or the item is cached already.
        """
        feature = request.mm_features[input_id]
        if feature.identifier in self._entries:
            raise InvariantError(f"{feature!r} is cached already.")
        while self.num_free_tokens < feature.length and self._evictable:
            self._remove(next(iter(self._evictable)))
        if self.num_free_tokens < feature.length:
            raise InvariantError(
                f"{feature!r} does not fit: {self.num_free_tokens} of {self.cache_size} encoder "
                "tokens are free."
            )
        entry = _Entry(feature.length)
        entry.holders.add((request.request_id, input_id))
        self._entries[feature.identifier] = entry
        self.num_free_tokens -= feature.length

    def free_encoder_input(self, request: Request, input_id: int) -> None:
        """Removes the request as a holder of one item. Without holders the item is evictable."""
        identifier = request.mm_features[input_id].identifier
        entry = self._entries.get(identifier)
        if entry is None or (request.request_id, input_id) not in entry.holders:
            return
        entry.holders.discard((request.request_id, input_id))
        if not entry.holders:
            self._evictable[identifier] = None

    def free(self, request: Request) -> None:
        """Removes the request as a holder of all its items."""
        for input_id in range(len(request.mm_features)):
            self.free_encoder_input(request, input_id)

    def holders(self, identifier: str) -> list[tuple[str, int]]:
        """Sorted pairs of request id and input id that need an item."""
        entry = self._entries.get(identifier)
        return [] if entry is None else sorted(entry.holders)

    def withdraw(self, identifier: str) -> None:
        """Removes an item that was scheduled for encoding but will not be encoded.

        The runner never had the item, so it is not reported as freed.

        Raises:
            InvariantError: A request needs the item.
        """
        if self.holders(identifier):
            raise InvariantError(f"encoder item {identifier!r} is needed.")
        self._remove(identifier)
        self._freed.remove(identifier)

    def drain_freed_identifiers(self) -> list[str]:
        """Items evicted since the last call. The runner drops them before it encodes new ones."""
        freed, self._freed = self._freed, []
        return freed

    def check_invariants(self, requests: dict[str, Request]) -> None:
        """Checks that held and free tokens add up, and that every holder is a known request.

        Raises:
            InvariantError: A rule is broken.
        """
        num_held = sum(entry.num_tokens for entry in self._entries.values())
        if num_held + self.num_free_tokens != self.cache_size or self.num_free_tokens < 0:
            raise InvariantError(f"{num_held} of {self.cache_size} encoder tokens are held.")
        unneeded = {identifier for identifier, e in self._entries.items() if not e.holders}
        if unneeded != set(self._evictable):
            raise InvariantError(
                f"items without a holder are {unneeded}, evictable are {set(self._evictable)}."
            )
        for identifier, entry in self._entries.items():
            for request_id, input_id in entry.holders:
                request = requests.get(request_id)
                if request is None or request.mm_features[input_id].identifier != identifier:
                    raise InvariantError(f"{request_id=} does not need encoder item {identifier}.")

    def _remove(self, identifier: str) -> None:
        self.num_free_tokens += self._entries.pop(identifier).num_tokens
        del self._evictable[identifier]
        self._freed.append(identifier)
