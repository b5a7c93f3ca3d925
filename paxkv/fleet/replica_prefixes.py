"""Which prompts a replica's prefix cache is likely to hold, as far as can be told from outside."""

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from paxkv.contracts.engine_request import EngineRequest

# Fewer than most blocks hold: so that the first words of a conversation tell it from others.
_CHUNK_TOKENS = 16
_CHUNK_BYTES = _CHUNK_TOKENS * array("i").itemsize


def prompt_chain(request: EngineRequest) -> list[int]:
    """A number for each whole chunk of the prompt, which tells that chunk and all before it.

    Two requests have equal numbers as far as they can share blocks, but for images and the like:
    those of a whole prompt are told apart from its first chunk on.
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
    """The prompts that one replica was sent last, as many as its KV cache has room for.

    The cache may hold less, because outputs take room too; then a prompt is computed again, as it
    would be elsewhere.

    Args:
        max_tokens: Token positions of the replica's KV cache.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_chunks = max_tokens // _CHUNK_TOKENS
        # The least recently sent first. A chunk of a prompt lies behind those that follow it in the
        # prompt: they are forgotten before it, because nothing can be found without it.
        # A plain dict would look for its first key behind all those that were removed before.
        self._chunks: OrderedDict[int, None] = OrderedDict()

    def num_known(self, chain: Sequence[int]) -> int:
        """How many of a prompt's first chunks have been sent."""
        for idx, chunk in enumerate(chain):
            if chunk not in self._chunks:
                return idx
        return len(chain)

    def note(self, chain: Sequence[int]) -> None:
        """A prompt has been sent."""
        chunks = self._chunks
        for chunk in reversed(chain):
            chunks[chunk] = None
            chunks.move_to_end(chunk)
        for _ in range(len(chunks) - self._max_chunks):
            chunks.popitem(last=False)

    def clear(self) -> None:
        """The cache is empty."""
        self._chunks.clear()
