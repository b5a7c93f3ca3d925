"""`IgnoredKeywords`: the response header that names schema keywords that no grammar enforces."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from paxkv.contracts.request_output import RequestOutput
from paxkv.contracts.schema_keywords import join_places

IGNORED_KEYWORDS_HEADER = "X-Paxkv-Ignored-Schema-Keywords"
# Many clients and proxies take 8 KiB of headers.
MAX_HEADER_CHARS = 2000
_IndexedOutputs = AsyncGenerator[tuple[int, RequestOutput], None]


class IgnoredKeywords:
    """The ignored keywords of one HTTP request. They are known after its first output."""

    def __init__(self) -> None:
        self._places: tuple[str, ...] = ()

    async def watch(self, outputs: _IndexedOutputs) -> _IndexedOutputs:
        """The same outputs."""
        async with aclosing(outputs):
            async for prompt_idx, output in outputs:
                self._places = output.ignored_schema_keywords
                yield prompt_idx, output

    def headers(self) -> dict[str, str]:
        """Headers of the response; none if every keyword is enforced."""
        if not self._places:
            return {}
        return {IGNORED_KEYWORDS_HEADER: join_places(self._places, MAX_HEADER_CHARS)}
