"""Forks: how many tokens a fork shares with its source, and the finished sources that are kept."""

from collections.abc import Iterator

from paxkv.scheduler.request import Request


def num_shareable_tokens(source: Request, child: Request) -> int:
    """Number of leading tokens whose keys and values are the same in both requests.

    The child's last token never counts: it must be computed, because its logits give the next
    token. The result does not depend on how many tokens the source has computed.
    """
    if (
        child.skip_reading_prefix_cache
        or source.lora_name != child.lora_name
        or source.cache_salt != child.cache_salt
    ):
        return 0
    num_tokens = _num_common_tokens(source.all_token_ids, child.all_token_ids)
    return min(num_tokens, _first_unequal_item(source, child), child.num_tokens - 1)


def _num_common_tokens(one: list[int], other: list[int]) -> int:
    num_tokens = min(len(one), len(other))
    if one[:num_tokens] == other[:num_tokens]:
        return num_tokens
    return next(idx for idx in range(num_tokens) if one[idx] != other[idx])


def _first_unequal_item(source: Request, child: Request) -> int:
    """Position of the first item that only one of the requests has; `num_tokens` if none."""
    source_items, child_items = source.mm_features, child.mm_features
    if source_items == child_items:
        return child.num_tokens
    num_items = min(len(source_items), len(child_items))
    idx = next(
        (idx for idx in range(num_items) if source_items[idx] != child_items[idx]), num_items
    )
    first_unequal = (*source_items[idx : idx + 1], *child_items[idx : idx + 1])
    return min(feature.offset for feature in first_unequal)


class KeptRequests:
    """Finished requests whose blocks are kept for requests that fork from them, oldest first."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}

    def add(self, request: Request) -> None:
        # A step in flight may have been scheduled for tokens past the end.
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens)
        self._requests[request.request_id] = request

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def pop(self, request_id: str) -> Request | None:
        """Removes and returns a request; None if unknown. The caller frees its blocks."""
        return self._requests.pop(request_id, None)

    def pop_oldest(self) -> Request | None:
        """Removes and returns the oldest request; None if empty. The caller frees its blocks."""
        return self._requests.pop(next(iter(self._requests), ""), None)

    def __contains__(self, request: Request) -> bool:
        return self._requests.get(request.request_id) is request

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __len__(self) -> int:
        return len(self._requests)
