"""Protocol of a KV connector: keys and values that come from, or go to, somewhere else."""

import dataclasses
from typing import Protocol

from paxkv.contracts.cache_request import CacheRequest


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVTransfer:
    """Blocks of one request to load or to save, whole or in part.

    Args:
        block_ids: One list per KV cache group, from the request's first block on; 0, the null
            block, where the group needs none any more: nothing is moved there.
        start_token_idx: First token position to move.
        num_tokens: Token positions to move.
    """

    request_id: str
    block_ids: tuple[list[int], ...]
    start_token_idx: int
    num_tokens: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVConnectorMetadata:
    """One step's transfers, for the connector's worker half."""

    loads: list[KVTransfer]
    saves: list[KVTransfer]


class KVConnector(Protocol):
    """The scheduler's half of a connector; every call comes from the engine's thread.

    Source: vLLM `distributed/kv_transfer/kv_connector/v1/base.py`.
    """

    def get_num_new_matched_tokens(
        self, request: CacheRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens beyond `num_computed_tokens` that can be loaded from outside.

        Returns:
            Their number, or None when that is not known yet and the request is to be asked for
            again; and whether they are loaded while other steps run. A load that is not
            asynchronous is done by the step that the request is first scheduled in.
        """
        ...

    def update_state_after_alloc(
        self, request: CacheRequest, block_ids: tuple[list[int], ...], num_external_tokens: int
    ) -> None:
        """The request holds these blocks now; `num_external_tokens` are to be loaded into them."""
        ...

    def build_connector_meta(
        self, num_computed_tokens_after_step: dict[str, int]
    ) -> KVConnectorMetadata:
        """This step's transfers, and forgets them.

        Args:
            num_computed_tokens_after_step: Of each request scheduled in this step.
        """
        ...

    def request_finished(self, request: CacheRequest, block_ids: tuple[list[int], ...]) -> bool:
        """A request ended; True keeps its blocks until `finished_sending` names it."""
        ...
