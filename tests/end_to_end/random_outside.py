"""A KV connector and a grammar gate whose answers are chance, for random workloads."""

import random
from collections.abc import Iterable

from paxkv.contracts.protocols import CacheRequest
from paxkv.contracts.scheduler_output import KVConnectorMetadata, KVConnectorOutput


class RandomGrammarGate:
    """Any grammar is compiled sooner or later."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def is_ready(self, request_id: str) -> bool:
        return self._rng.random() < 0.4


class RandomConnector:
    """Knows some tokens of some requests, loads them now or later, and saves some at their end."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        # Request id -> whether its tokens are loaded beside other steps.
        self._matched: dict[str, bool] = {}
        # Request id -> blocks that are being loaded, of the first group.
        self._loading: dict[str, list[int]] = {}
        self._saving: set[str] = set()

    @property
    def is_busy(self) -> bool:
        return bool(self._loading or self._saving)

    def get_num_new_matched_tokens(
        self, request: CacheRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        num_left = request.num_tokens - num_computed_tokens
        chance = self._rng.random()
        if chance > 0.1 or num_left < 2:
            return 0, False
        if chance < 0.02:
            return None, False
        self._matched[request.request_id] = chance < 0.06
        return self._rng.randint(1, num_left), chance < 0.06

    def update_state_after_alloc(
        self, request: CacheRequest, block_ids: tuple[list[int], ...], num_external_tokens: int
    ) -> None:
        if num_external_tokens > 0 and self._matched.pop(request.request_id):
            self._loading[request.request_id] = [b for b in block_ids[0] if b != 0]

    def build_connector_meta(
        self, num_computed_tokens_after_step: dict[str, int]
    ) -> KVConnectorMetadata:
        return KVConnectorMetadata(loads=[], saves=[])

    def request_finished(self, request: CacheRequest, block_ids: tuple[list[int], ...]) -> bool:
        self._matched.pop(request.request_id, None)
        is_saved = self._rng.random() < 0.1
        if is_saved:
            self._saving.add(request.request_id)
        return is_saved

    def take_output(self) -> KVConnectorOutput | None:
        """Transfers that are done since the last call; None where there are none."""
        loaded, saved = self._choose(self._loading), self._choose(self._saving)
        self._saving -= saved
        loaded_blocks = [self._loading.pop(req_id) for req_id in sorted(loaded)]
        if not loaded and not saved:
            return None
        # A block in ten loads could not be read.
        invalid = [self._rng.choice(b) for b in loaded_blocks if b and self._rng.random() < 0.1]
        return KVConnectorOutput(
            finished_recving=loaded, finished_sending=saved, invalid_block_ids=frozenset(invalid)
        )

    def _choose(self, transfers: Iterable[str]) -> frozenset[str]:
        # Sorted: the order of a set of strings is another one in every process.
        return frozenset(req_id for req_id in sorted(transfers) if self._rng.random() < 0.3)
