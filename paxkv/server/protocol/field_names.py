"""`FieldNames`: a route's names for the fields of a chat.

`/v1/responses` and `/v1/messages` convert their bodies to a chat. Errors in the chat must name the
fields that the client sent, so the code that raises them uses these names.
"""

import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import TypeVar

from paxkv.errors import InvalidRequestError

_ItemT = TypeVar("_ItemT")
# A field of the engine's API -> the field of a chat that it comes from.
_CHAT_PARAMS = {"prompt": "messages"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FieldNames:
    """Names of fields in errors. The defaults are the names of /v1/chat/completions.

    Args:
        params: A field of a chat -> the field of the route, for the `param` of errors.
        form: The field that asks for structured output.
        form_schema: The field of a JSON schema in it.
        form_strict: The field that says whether the schema is strict.
        tool_schema: The field of a tool for the schema of its arguments.
        tool_strict: The field of a tool that says whether the schema is strict.
        any_tools: The tools that a `tool_choice` needs.
        automatic: The `tool_choice` that leaves calls to the model.
        named_choice: The `tool_choice` that names a tool.
        tool_idxs: The index in the request's body of each tool of the chat. None if the chat has
            all tools of the body.
    """

    params: Mapping[str, str] = dataclasses.field(default_factory=lambda: _CHAT_PARAMS)
    form: str = "response_format"
    form_schema: str = "response_format.json_schema.schema"
    form_strict: str = "response_format.json_schema.strict"
    tool_schema: str = "function.parameters"
    tool_strict: str = "function.strict"
    any_tools: str = "tools of type function"
    automatic: str = '"auto"'
    named_choice: str = '{"type": "function", "function": {"name": "..."}}'
    tool_idxs: tuple[int, ...] | None = None

    def tool_path(self, k: int) -> str:
        """The field of tool `k` of the chat: "tools[3]"."""
        return f"tools[{k if self.tool_idxs is None else self.tool_idxs[k]}]"

    def with_tools(
        self,
        tools: Sequence[Mapping[str, object]] | None,
        is_ignored: Callable[[Mapping[str, object]], bool],
    ) -> "FieldNames":
        """Sets `tool_idxs` for a request with these tools; the chat omits the ignored ones."""
        idxs = tuple(k for k, tool in enumerate(tools or ()) if not is_ignored(tool))
        return dataclasses.replace(self, tool_idxs=idxs)

    @contextlib.contextmanager
    def in_errors(self) -> Iterator[None]:
        """A context in which errors get the route's `param`."""
        try:
            yield
        except InvalidRequestError as error:
            error.param = self.params.get(error.param, error.param)
            raise

    async def in_errors_of(
        self, outputs: AsyncGenerator[_ItemT, None]
    ) -> AsyncGenerator[_ItemT, None]:
        """Yields the same outputs; errors of the engine get the route's `param`."""
        with self.in_errors():
            async with aclosing(outputs):
                async for output in outputs:
                    yield output


CHAT_NAMES = FieldNames()
