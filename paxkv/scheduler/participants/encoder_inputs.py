"""EncoderInputs: the items (images, for example) that a step encodes, within budget and cache."""

import dataclasses

from paxkv.scheduler.participants.encoder_cache_manager import EncoderCacheManager
from paxkv.scheduler.request import Request


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EncoderDemand:
    """The encoder items that a chunk of one request needs; nothing is allocated yet.

    Args:
        num_new_tokens: Tokens that can be computed: all before the first item that cannot be
            encoded now.
        input_ids: Items in the chunk, including cached ones. `commit` decides which of them the
            step must encode: a cached item is lost if the request that encodes it is preempted.
    """

    num_new_tokens: int
    input_ids: list[int]


class EncoderInputs:
    """Allocates a step's encoder budget and the encoder cache to requests.

    Args:
        max_num_encoder_input_tokens: Encoder tokens that one step may compute.
        is_encoder_decoder: Items have no position in the prompt. All are encoded before the
            request's first token, and cross-attention uses their K and V.
    """

    def __init__(
        self, *, max_num_encoder_input_tokens: int, cache_size: int, is_encoder_decoder: bool
    ) -> None:
        self.cache_manager = EncoderCacheManager(cache_size)
        self.is_encoder_decoder = is_encoder_decoder
        self._max_num_encoder_input_tokens = max_num_encoder_input_tokens
        self._budget = max_num_encoder_input_tokens
        # Request id -> indices of the items that this step encodes for it.
        self._scheduled: dict[str, list[int]] = {}
        # Requests that hold items.
        self._holders: dict[str, Request] = {}

    def start_step(self) -> None:
        self._budget = self._max_num_encoder_input_tokens

    def drain_scheduled(self) -> dict[str, list[int]]:
        """The items that this step encodes: request id -> indices into `mm_features`.

        Call it when the step is decided; after that, no request of the step may be preempted.
        """
        scheduled, self._scheduled = self._scheduled, {}
        return scheduled

    def fit(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> EncoderDemand:
        """Cuts a chunk before the first needed item that cannot be encoded now.

        An item is encoded as a whole, because its tokens attend to each other.

        Args:
            num_new_tokens: Tokens that the chunk should have.
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
            # The check also covers cached items: room for the earlier items of the chunk must not
            # come from evicting this one.
            if num_tokens > 0 and (
                num_tokens > self._budget
                or num_tokens > self.cache_manager.num_allocatable_tokens(identifiers)
            ):
                # The difference is negative if a prefix hit ends inside the item.
                num_new_tokens = max(start - num_computed_tokens, 0)
                break
            num_tokens_to_encode = num_tokens
            needed.append(input_id)
        return EncoderDemand(num_new_tokens=num_new_tokens, input_ids=needed)

    def commit(self, request: Request, demand: EncoderDemand) -> None:
        """Allocates what `fit` found, for a chunk that is now scheduled."""
        if demand.input_ids:
            self._holders[request.request_id] = request
        # Hold cached items first; otherwise room for the other items could come from evicting them.
        self.cache_manager.hold(request, demand.input_ids)
        for input_id in demand.input_ids:
            feature = request.mm_features[input_id]
            if not self.cache_manager.is_cached(feature):
                self.cache_manager.allocate(request, input_id)
                self._budget -= feature.length
                self._scheduled.setdefault(request.request_id, []).append(input_id)
        # An item that occurs twice in the chunk is cached only now.
        self.cache_manager.hold(request, demand.input_ids)

    def release_preempted(self, request: Request) -> None:
        """Releases a preempted request's items, and cancels what this step encodes for it.

        If another request of this step needs one of these items, the step encodes it for that
        request instead.
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
        """Releases all items of a request."""
        if self._holders.pop(request.request_id, None) is not None:
            self.cache_manager.free(request)

    def end_step(self) -> None:
        """Releases items whose positions are computed: the KV cache holds their K and V."""
        for request in self._holders.values():
            for input_id, feature in enumerate(request.mm_features):
                end = 1 if self.is_encoder_decoder else feature.offset + feature.length
                if end > request.num_computed_tokens:
                    break
                self.cache_manager.free_encoder_input(request, input_id)
