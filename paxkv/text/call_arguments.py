"""The arguments of an earlier tool call as a chat template takes them."""

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

from paxkv.errors import InvalidRequestError

# Objects and lists inside each other. Python's JSON encoder, which templates call, fails at about
# 900, and so does the decoder of a body that brings the arguments back.
MAX_DEPTH = 200
# The only member of arguments that are no object, for templates that write member by member.
_ONLY_KEY = "arguments"


class CallText(Mapping[str, object]):
    """Arguments that are not the JSON of an object, such as those of a call that was cut off.

    Most templates write arguments with `tojson`, which writes this text as it is. A template that
    goes through the members of arguments finds one, which holds the text.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __getitem__(self, key: str) -> object:
        if key != _ONLY_KEY:
            raise KeyError(key)
        return self._text

    def __iter__(self) -> Iterator[str]:
        return iter((_ONLY_KEY,))

    def __len__(self) -> int:
        return 1


def template_arguments(
    arguments: object, *, decode: Callable[[bytes], object] = msgspec.json.decode
) -> Mapping[str, object]:
    """The arguments of a call, whatever a model wrote or a client sent.

    '{"a": 1}' -> {"a": 1}; None and blank text -> {}; '{"a": ' -> CallText('{"a": '); [1] ->
    CallText("[1]").

    Args:
        decode: Reads JSON. A ValueError means that the text is not an object for templates.

    Raises:
        InvalidRequestError: They are no text and are nested too deeply.
    """
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        check_depth("the arguments of a tool call", arguments)
        return arguments if isinstance(arguments, Mapping) else CallText(dump_json(arguments))
    if not arguments.strip():
        return {}
    try:
        found = decode(arguments.encode())
    except (ValueError, RecursionError, msgspec.MsgspecError):
        return CallText(arguments)
    is_usable = isinstance(found, dict) and not is_deep(found)
    return found if is_usable else CallText(arguments)


def check_depth(name: str, value: object) -> None:
    """Refuses JSON values that templates cannot write.

    Args:
        name: What the error calls it.

    Raises:
        InvalidRequestError: More than `MAX_DEPTH` objects and lists are inside each other.
    """
    if is_deep(value):
        raise InvalidRequestError(
            f"{name} may have at most {MAX_DEPTH} objects and lists inside each other. Send fewer "
            "levels, or the JSON as a string."
        )


def is_deep(value: object) -> bool:
    """Whether more than `MAX_DEPTH` objects and lists of a JSON value are inside each other."""
    level = [value] if isinstance(value, (Mapping, list)) else []
    for _ in range(MAX_DEPTH):
        if not level:
            return False
        level = [child for parent in level for child in _children(parent)]
    return bool(level)


def _children(value: object) -> Iterable[object]:
    """The objects and lists in a JSON value."""
    values = value.values() if isinstance(value, Mapping) else value
    return [child for child in values if isinstance(child, (Mapping, list))]


def dump_json(
    value: object,
    *,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON of a value, in which every `CallText` is the text that it holds."""
    # Stands in the JSON for the text, and is unknown to the client.
    mark = ""
    texts: list[str] = []

    def hold_place(value: object) -> str:
        nonlocal mark
        if not isinstance(value, CallText):
            raise TypeError(f"{type(value).__name__} is not a JSON value")
        mark = mark or uuid.uuid4().hex
        texts.append(str(value))
        return mark

    dumped = json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=hold_place,
    )
    if not texts:
        return dumped
    # `json.dumps` calls `hold_place` in the order in which the marks appear in the JSON.
    first, *others = dumped.split(f'"{mark}"')
    return first + "".join(text + other for text, other in zip(texts, others, strict=True))
