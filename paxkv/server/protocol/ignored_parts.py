"""Parts of requests that the server ignores, because the answer is still useful without them.

Clients cannot always change what they send: agents add fields and tools of their vendor's server to
every request. `IgnoredPartsMiddleware` logs such parts and names them in a header of the answer.
"""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from contextvars import ContextVar

from paxkv.contracts.request_output import RequestOutput
from paxkv.contracts.schema_keywords import join_places
from paxkv.server.protocol.unsupported_fields import NeutralValues, asks_for_nothing

MAX_NAMES = 16
MAX_NAME_CHARS = 80
# Many clients and proxies take 8 KiB of headers.
MAX_HEADER_CHARS = 2000
_IndexedOutputs = AsyncGenerator[tuple[int, RequestOutput], None]


class IgnoredParts:
    """The ignored parts of one HTTP request.

    Attributes:
        names: Names of fields, tools and items.
        schema_keywords: Places of keywords in its JSON schemas that no grammar can enforce. They
            are known after the first output.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.schema_keywords: tuple[str, ...] = ()

    def header(self) -> str:
        """The names, then the places; empty if nothing is ignored."""
        return join_places((*self.names, *self.schema_keywords), MAX_HEADER_CHARS)


# Set by the middleware for the task that serves a request, and inherited by its threads. The
# alternative is one more result of every function that reads a part of a body.
ignored_parts: ContextVar[IgnoredParts | None] = ContextVar("ignored_parts", default=None)


def record_ignored(name: str) -> None:
    """Records that a part of the current request is ignored.

    Args:
        name: Such as "context_management", or "tools of type web_search_20250305".
    """
    ignored = ignored_parts.get()
    # The name is for a header, but a client may have chosen any characters.
    name = "".join(c if c.isascii() and c.isprintable() else "?" for c in name[:MAX_NAME_CHARS])
    if ignored is not None and name not in ignored.names and len(ignored.names) < MAX_NAMES:
        ignored.names.append(name)


async def record_ignored_keywords(outputs: _IndexedOutputs) -> _IndexedOutputs:
    """Yields the same outputs, and records the schema keywords that their grammar ignores."""
    async with aclosing(outputs):
        async for prompt_idx, output in outputs:
            ignored = ignored_parts.get()
            if ignored is not None:
                ignored.schema_keywords = output.ignored_schema_keywords
            yield prompt_idx, output


def record_ignored_fields(fields: Mapping[str, object], ignored: NeutralValues) -> None:
    """Records each ignored field that asks for something.

    Args:
        ignored: The fields that are ignored, with the values that ask for nothing.
    """
    for name, neutral in ignored.items():
        if not asks_for_nothing(fields.get(name), neutral):
            record_ignored(name)


def is_ignored_tool(tool: Mapping[str, object], *, own_types: tuple[str, ...], form: str) -> bool:
    """Whether a tool is ignored, because another server, or a client of another API, runs it.

    {"type": "web_search"} is ignored, but {"type": "functoin", "parameters": {}} is a mistake.

    Args:
        own_types: Types of tools that the route supports.
        form: A field that only these types have.
    """
    kind = tool.get("type")
    if not isinstance(kind, str) or kind in own_types or form in tool:
        return False
    record_ignored(f"tools of type {kind}")
    return True
