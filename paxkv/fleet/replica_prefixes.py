"""`ReplicaPrefixes`: an estimate of the prompts that a replica's prefix cache holds."""

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from paxkv.contracts.engine_request import EngineRequest

# Tokens per chunk: fewer than in most blocks, so that short beginnings distinguish prompts too.
_CHUNK_TOKENS = 16
_CHUNK_BYTES = _CHUNK_TOKENS * array("i").itemsize


def prompt_chain(request: EngineRequest) -> list[int]:
    """Hashes each whole chunk of the prompt together with all chunks before it.

    Two requests have equal hashes as far as they can share blocks. Exception: if their images or
    other multimodal items differ, all hashes differ, although text before an item can be shared.
    """
    items = tuple(feature.identifier for feature in request.mm_features)
    parent = hash((request.cache_salt, request.lora_name, items))
    data = array("i", request.prompt_token_ids).tobytes()
    chain: list[int] = []
    for end in range(_CHUNK_BYTES, len(data) + 1, _CHUNK_BYTES):
        parent = hash((parent, data[end - _CHUNK_BYTES : end]))
        chain.append(parent)
    return chain


class ReplicaPrefixes:
    """The prompts most recently sent to one replica, up to the size of its KV cache.

    The cache may hold fewer, because outputs use blocks too. A wrong guess only costs computing the
    prompt again.

    Args:
        max_tokens: Token positions of the replica's KV cache.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_chunks = max_tokens // _CHUNK_TOKENS
        # Least recently sent chunks first. Within a prompt, later chunks come before earlier ones,
        # so they are removed first: without the first chunk no chunk of the prompt can be found.
        # Not a plain dict: finding its first key takes longer with every removed key.
        self._chunks: OrderedDict[int, None] = OrderedDict()

    def num_known(self, chain: Sequence[int]) -> int:
        """Counts the leading chunks of the prompt that were sent before."""
        for idx, chunk in enumerate(chain):
            if chunk not in self._chunks:
                return idx
        return len(chain)

    def record(self, chain: Sequence[int]) -> None:
        """Records a prompt that was sent to the replica."""
        chunks = self._chunks
        for chunk in reversed(chain):
            chunks[chunk] = None
            chunks.move_to_end(chunk)
        for _ in range(len(chunks) - self._max_chunks):
            chunks.popitem(last=False)

    def clear(self) -> None:
        """Forgets all prompts, after the replica's cache was emptied."""
        self._chunks.clear()
