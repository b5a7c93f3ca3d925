"""EncoderInputs: which images and the like a step encodes, within its budget and the cache."""

import dataclasses

from paxkv.scheduler.participants.encoder_cache_manager import EncoderCacheManager
from paxkv.scheduler.request import Request


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EncoderDemand:
    """What a chunk of one request needs of the encoder; nothing is taken yet.

    Args:
        num_new_tokens: Tokens that can be computed: those before the first item that cannot be
            encoded now.
        input_ids: Items in the chunk, cached ones included. Which of them the step must encode is
            decided in `commit`: whoever was to encode one may be preempted in between.
    """

    num_new_tokens: int
    input_ids: list[int]


class EncoderInputs:
    """Shares out a step's encoder budget and the encoder cache.

    Args:
        max_num_encoder_input_tokens: Encoder tokens that one step may compute.
        is_encoder_decoder: Items stand at no positions of the prompt: all are encoded before the
            request's first token, and their K and V go to cross-attention.
    """

    def __init__(
        self, *, max_num_encoder_input_tokens: int, cache_size: int, is_encoder_decoder: bool
    ) -> None:
        self.cache_manager = EncoderCacheManager(cache_size)
        self.is_encoder_decoder = is_encoder_decoder
        self._max_num_encoder_input_tokens = max_num_encoder_input_tokens
        self._budget = max_num_encoder_input_tokens
        # Per request, what this step encodes for it.
        self._scheduled: dict[str, list[int]] = {}
        # Those that hold items.
        self._holders: dict[str, Request] = {}

    def start_step(self) -> None:
        self._budget = self._max_num_encoder_input_tokens

    def take_scheduled(self) -> dict[str, list[int]]:
        """What this step encodes: indices of `mm_features` per request id.

        To be called when the step has been decided: from then on nothing of it is given back.
        """
        scheduled, self._scheduled = self._scheduled, {}
        return scheduled

    def fit(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> EncoderDemand:
        """Cuts a chunk before the first item that it needs and that cannot be encoded now.

        An item is encoded as a whole, as its tokens see each other.

        Args:
            num_new_tokens: Tokens that the chunk is to have.
        """
        needed: list[int] = []
        identifiers: set[str] = set()
        num_tokens_to_encode = 0
        for input_id, feature in enumerate(request.mm_features):
            start = 0 if self.is_encoder_decoder else feature.offset
            end = 1 if self.is_encoder_decoder else feature.offset + feature.length
            if start >= num_computed_tokens + num_new_tokens:
                break
            if end <= num_computed_tokens:
                continue
            is_new = feature.identifier not in identifiers and not self.cache_manager.is_cached(
                feature
            )
            num_tokens = num_tokens_to_encode + (feature.length if is_new else 0)
            identifiers.add(feature.identifier)
            # Also for a cached item: the room for those before it must not come from itself.
            if num_tokens > 0 and (
                num_tokens > self._budget
                or num_tokens > self.cache_manager.num_allocatable_tokens(identifiers)
            ):
                # 0 where a prefix hit ends inside the item.
                num_new_tokens = max(start - num_computed_tokens, 0)
                break
            num_tokens_to_encode = num_tokens
            needed.append(input_id)
        return EncoderDemand(num_new_tokens=num_new_tokens, input_ids=needed)

    def commit(self, request: Request, demand: EncoderDemand) -> None:
        """Takes what `fit` found; the chunk is scheduled."""
        if demand.input_ids:
            self._holders[request.request_id] = request
        # First those that are there, or making room for the others could drop them.
        self.cache_manager.hold(request, demand.input_ids)
        for input_id in demand.input_ids:
            feature = request.mm_features[input_id]
            if not self.cache_manager.is_cached(feature):
                self.cache_manager.allocate(request, input_id)
                self._budget -= feature.length
                self._scheduled.setdefault(request.request_id, []).append(input_id)
        # An item that the chunk has twice.
        self.cache_manager.hold(request, demand.input_ids)

    def give_back(self, request: Request) -> None:
        """Releases a preempted request's items, and what this step was to encode for it.

        Another request of this step may count on one of those; it is encoded for that one then.
        """
        self.release(request)
        for input_id in self._scheduled.pop(request.request_id, ()):
            feature = request.mm_features[input_id]
            heirs = self.cache_manager.holders(feature.identifier)
            if heirs:
                heir_id, heir_input_id = heirs[0]
                self._scheduled.setdefault(heir_id, []).append(heir_input_id)
            else:
                self.cache_manager.withdraw(feature.identifier)
                self._budget += feature.length

    def release(self, request: Request) -> None:
        """The request needs none of its items any more."""
        if self._holders.pop(request.request_id, None) is not None:
            self.cache_manager.free(request)

    def end_step(self) -> None:
        """Releases items whose positions are computed now: their K and V are in the KV cache."""
        for request in self._holders.values():
            for input_id, feature in enumerate(request.mm_features):
                end = 1 if self.is_encoder_decoder else feature.offset + feature.length
                if end > request.num_computed_tokens:
                    break
                self.cache_manager.free_encoder_input(request, input_id)
