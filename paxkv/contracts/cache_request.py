"""Protocol through which the KV cache manager sees a request."""

from collections.abc import Sequence
from typing import Protocol


class CacheRequest(Protocol):
    """What the KV cache reads of a request; it never writes to one."""

    @property
    def request_id(self) -> str: ...

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt and output tokens known so far."""
        ...

    @property
    def num_tokens(self) -> int:
        """Number of `all_token_ids`."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose K and V are in the request's blocks, by the steps sent off so far."""
        ...

    @property
    def num_preemptions(self) -> int: ...

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Chained hash of each full `hash_block_size` of its tokens; empty without caching."""
        ...

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """True: compute the whole prompt, even where the cache has it."""
        ...

    @property
    def lora_name(self) -> str | None: ...

    @property
    def cache_salt(self) -> str | None: ...
